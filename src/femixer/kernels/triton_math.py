"""Elementary functions of Triton kernels. All in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)); beyond 20 it is x to float32's last digit."""
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_add_exp(a, b):
    """log(exp(a) + exp(b)), also where both are -inf."""
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(top == float("-inf"), top, finite + tl.log(tl.exp(a - finite) + tl.exp(b - finite)))
