"""The unnormalized read in torch's operations."""

from torch import Tensor


def forward(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    whole = mean * log_total.exp()
    return whole, mean.new_empty(0) if free is None or beta is None else free + log_total / beta
