"""Small texts for tests of language models, and what is in their shards. The fixtures are in conftest.py."""

import gzip
import json

import numpy as np

WORDS = ["the", "free", "energy", "posterior", "divergence;", "größer,", "自由", "😀", "42", "a", "is", "of"]


def texts(count, seed=0):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, 5 + number % 13)) + f" {number}\n" for number in range(count)]


def write_lines(path, records):
    raw = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def everything(split):
    return split.read(0, split.tokens)


def documents_of(split, tokenizer):
    """The texts in a token stream."""
    tokens, starts = everything(split)
    return [tokenizer.decode(one[1:]) for one in np.split(tokens.astype(int), starts[1:])]
