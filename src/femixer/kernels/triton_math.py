"""Elementary functions of Triton kernels, all in float32; and a number that a compiler does not know."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit
def expm1(x):
    """exp(x) - 1, with all its digits near zero."""
    small = tl.where(tl.abs(x) < 0.25, x, 0.0)
    rest = 1 / 24 + small * (1 / 120 + small * (1 / 720 + small * (1 / 5040)))
    series = small * (1 + small * (0.5 + small * (1 / 6 + small * rest)))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1)


@triton.jit
def log1p(x):
    """log(1 + x), with all its digits near zero: the rounding of 1 + x is taken back."""
    whole = 1 + x
    return tl.log(whole) - ((whole - 1) - x) / whole


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with all its digits also where it is small."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def log_add_exp(a, b):
    """log(exp(a) + exp(b)), also where both are -inf."""
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(top == float("-inf"), top, finite + tl.log(tl.exp(a - finite) + tl.exp(b - finite)))


@triton.jit
def shares(odds):
    """1 / (1 + exp(-odds)) and 1 / (1 + exp(odds)), each to the last digits."""
    factor = tl.exp(-tl.abs(odds))
    large = 1 / (1 + factor)
    small = factor * large
    return tl.where(odds > 0, large, small), tl.where(odds > 0, small, large)


@triton.jit
def rolled(count, T):
    """The count, which a compiler that does not know T >= 0 cannot know: it would unroll the loop, load for all steps
    at once and have no registers left."""
    return count + tl.minimum(T, 0)
