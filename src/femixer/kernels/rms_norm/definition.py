"""RMS norm by its definition, in float64."""

from typing import Any

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double(),)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    return {
        "rows": (torch.randn(3, 5, 7), torch.randn(7), 1e-6),
        "one row": (torch.randn(1, 11), torch.randn(11), 1e-5),
        "zero": (torch.zeros(2, 3), torch.ones(3), 1e-6),
    }
