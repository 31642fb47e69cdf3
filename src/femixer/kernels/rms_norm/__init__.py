"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.operator import declared


@declared(fusible=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] -> [..., width]."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


OPERATOR = rms_norm.operator


DIFFERENTIABLE = True


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """By torch's own."""
    return (F.rms_norm(x, weight.shape, weight, eps),)


def definition(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The formula in float64."""
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double(),)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    return {
        "rows": (torch.randn(3, 5, 7), torch.randn(7), 1e-6),
        "one row": (torch.randn(1, 11), torch.randn(11), 1e-5),
        "zero": (torch.zeros(2, 3), torch.ones(3), 1e-6),
    }
