"""Models over several devices: sequences (cp), heads (tp) and batches (dp) divided over the ranks of a mesh."""

from femixer.parallel.cut import own_tokens, whole_sequence
from femixer.parallel.plan import HeadParallel, WidthParallel, parallelize, tensor_plan
from femixer.parallel.weights import full_state_dict, load_full_state_dict

__all__ = [
    "HeadParallel",
    "WidthParallel",
    "full_state_dict",
    "load_full_state_dict",
    "own_tokens",
    "parallelize",
    "tensor_plan",
    "whole_sequence",
]
