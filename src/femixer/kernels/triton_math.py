"""Elementary functions of Triton kernels. All in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last digits where it is small; beyond 20 it is x to float32's last digit."""
    return tl.where(x > 20, x, log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_add_exp(a, b):
    """log(exp(a) + exp(b)), also where both are -inf."""
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(top == float("-inf"), top, finite + tl.log(tl.exp(a - finite) + tl.exp(b - finite)))


@triton.jit
def expm1(x):
    """exp(x) - 1 to the last digits where x is small."""
    small = tl.where(tl.abs(x) < 0.35, x, 0.0)
    series = 1 + small / 4 * (1 + small / 5 * (1 + small / 6 * (1 + small / 7)))
    return tl.where(tl.abs(x) < 0.35, small * (1 + small / 2 * (1 + small / 3 * series)), tl.exp(x) - 1)


@triton.jit
def log1p(x):
    """log(1 + x) to the last digits where x is small: what rounding took from 1 + x is put back."""
    y = 1 + x
    rounded = y - 1
    return tl.where(rounded == 0, x, tl.log(y) * (x / tl.where(rounded == 0, 1.0, rounded)))


@triton.jit
def shares(odds):
    """1 / (1 + exp(-odds)) and 1 / (1 + exp(odds)), each to the last digits."""
    factor = tl.exp(-tl.abs(odds))
    large = 1 / (1 + factor)
    small = factor * large
    return tl.where(odds > 0, large, small), tl.where(odds > 0, small, large)
