"""A normalized read under weights that are not normalized, of total w = exp(log_total):

mean -> w mean = sum_i w_i v_i,   free -> free + log(w) / beta = log(sum_i w_i exp(beta v_i)) / beta
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import declared


@declared(outputs=2, fusible=True)
def unnormalized(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """mean, free and log_total [B, T, H, D]; beta [H, D]; free and beta come together, without them free is empty.
    Results: log_total's type."""
    return log_total.new_empty(mean.shape), log_total.new_empty(0 if free is None else mean.shape)


OPERATOR = unnormalized.operator


def forward(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    """In torch's operations."""
    whole = mean * log_total.exp()
    return whole, whole.new_empty(0) if free is None or beta is None else free + log_total / beta


def definition(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    """The formula in float64."""
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
