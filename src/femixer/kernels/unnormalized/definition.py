"""The unnormalized read by its definition, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    whole = mean.double() * log_total.double().exp()
    if free is None or beta is None:
        return whole, mean.new_empty(0)
    return whole, free.double() + log_total.double() / beta.double()


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    mean, rise, log_total = torch.randn(3, 2, 7, 3, 5)
    beta = 0.5 + torch.rand(3, 5)
    return {
        "mean and free energy": (mean, mean + rise.abs(), log_total, beta),
        "mean": (mean, None, log_total, None),
        "cold": (mean, mean + rise.abs(), log_total, 0.03 * beta),
        "no token": (mean[:, :0], mean[:, :0], log_total[:, :0], beta),
    }
