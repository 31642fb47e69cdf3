"""y = scale softplus(x + bias) + floor: steps and weights that are positive, and log decays, which are negative."""

from __future__ import annotations

from torch import Tensor

from femixer.kernels.operator import declared, wide_dtype


@declared(fusible=True)
def softplus(x: Tensor, bias: Tensor | None = None, scale: float = 1.0, floor: float = 0.0) -> Tensor:
    """x [..., *shape of bias] -> the same shape, in float32 or better; bias None for zero."""
    return x.new_empty(x.shape, dtype=wide_dtype(x))


OPERATOR = softplus.operator
