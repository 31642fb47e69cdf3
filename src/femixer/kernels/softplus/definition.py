"""The scaled softplus by its definition, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(x: Tensor, bias: Tensor | None, scale: float, floor: float) -> tuple[Tensor, ...]:
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
