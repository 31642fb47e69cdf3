"""Models over several devices: sequences (cp), heads (tp) and batches (dp) divided over the ranks of a mesh."""

from femixer.parallel.cut import own_tokens, summed_over_cut, whole_sequence
from femixer.parallel.plan import HeadParallel, WidthParallel, parallelize, tensor_plan
from femixer.parallel.weights import full_state_dict, load_full_state_dict

__all__ = [
    "HeadParallel",
    "WidthParallel",
    "full_state_dict",
    "load_full_state_dict",
    "own_tokens",
    "parallelize",
    "summed_over_cut",
    "tensor_plan",
    "whole_sequence",
]
