"""y = scale softplus(x + bias) + floor: steps and weights that are positive, and log decays, which are negative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import declared, wide_dtype


@declared(fusible=True)
def softplus(x: Tensor, bias: Tensor | None = None, scale: float = 1.0, floor: float = 0.0) -> Tensor:
    """x [..., *shape of bias] -> the same shape, in float32 or better; bias None for zero."""
    return x.new_empty(x.shape, dtype=wide_dtype(x))


OPERATOR = softplus.operator


def definition(x: Tensor, bias: Tensor | None, scale: float, floor: float) -> tuple[Tensor, ...]:
    """The formula in float64."""
    x = x.double() if bias is None else x.double() + bias.double()
    return (scale * torch.logaddexp(x, torch.zeros_like(x)) + floor,)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    columns = torch.randn(2, 7, 19)  # of a projection
    return {
        "log decays per channel": (columns[..., 2:17].unflatten(-1, (3, 5)), torch.randn(3, 5), -1.0, 0.0),
        "steps": (columns[..., 4:7], torch.randn(3), 1.0, 1e-6),
        "without a bias": (columns, None, 1.0, 1e-6),
        "parameters": (torch.randn(3, 5, 2), None, -1.0, 0.0),
        "large": (60 * torch.randn(5, 19), torch.randn(19), 1.0, 0.0),
        "no token": (torch.zeros(2, 0, 3), torch.randn(3), 1.0, 0.0),
    }
