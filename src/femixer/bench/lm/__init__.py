"""`femixer bench lm`: FEM language models against the plain transformer and transformers' Llama of the same size."""
