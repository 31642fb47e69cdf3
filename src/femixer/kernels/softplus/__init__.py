"""y = scale softplus(x + bias) + floor: steps and weights that are positive, and log decays, which are negative."""

from __future__ import annotations

from torch import Tensor

from femixer.kernels.operator import Operator
from femixer.kernels.precision import wide_dtype


def _results(x: Tensor, bias: Tensor | None, scale: float, floor: float) -> tuple[Tensor, ...]:
    return (x.new_empty(x.shape, dtype=wide_dtype(x)),)


OPERATOR = Operator(__name__, _results, fusible=True)


def softplus(x: Tensor, bias: Tensor | None = None, scale: float = 1.0, floor: float = 0.0) -> Tensor:
    """x [..., *shape of bias] -> the same shape, in float32 or better; bias None for zero."""
    return OPERATOR(x, bias, scale, floor)[0]
