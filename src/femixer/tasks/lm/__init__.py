"""Language modelling: corpora, tokenizers, shards of tokens, and the commands that train on them."""
