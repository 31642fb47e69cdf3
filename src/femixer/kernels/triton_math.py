"""Elementary functions of Triton kernels. All in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to float32's last digits also where it is small: log(1 + s) = s log(1 + s) / ((1 + s) - 1),
    where the rounding of 1 + s is the same above and below."""
    small = tl.exp(-tl.abs(x))
    sum = 1 + small
    return tl.maximum(x, 0.0) + tl.where(sum == 1, small, tl.log(sum) * (small / tl.where(sum == 1, 1.0, sum - 1)))


@triton.jit
def log_add_exp(a, b):
    """log(exp(a) + exp(b)), also where both are -inf."""
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(top == float("-inf"), top, finite + tl.log(tl.exp(a - finite) + tl.exp(b - finite)))
