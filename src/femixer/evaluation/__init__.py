"""Evaluation of language models with lm-evaluation-harness, and the paper's table of the results."""
