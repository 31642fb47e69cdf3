"""Two reads as one: mean, free energy and total weight of a token's past and of its future together.

    w = exp(log_total), w' of the future:   mean = (w mu + w' mu') / (w + w'),   log_total = log(w + w')
    free = log((w exp(beta F) + w' exp(beta F')) / (w + w')) / beta

Axes: B batch, T tokens, H heads, D value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import Operator


def _results(
    mean: Tensor,
    free: Tensor | None,
    log_total: Tensor,
    later_mean: Tensor,
    later_free: Tensor | None,
    later_total: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, ...]:
    both = torch.empty_like(mean, memory_format=torch.contiguous_format)
    total = torch.empty_like(log_total, memory_format=torch.contiguous_format)
    return both, mean.new_empty(0) if free is None else torch.empty_like(both), total


OPERATOR = Operator(__name__, _results, outputs=3, left_to_torch="a few passes over memory beside two scans")


def two_reads(
    past: tuple[Tensor, Tensor | None, Tensor], future: tuple[Tensor, Tensor | None, Tensor], beta: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """mean, free energy (None without beta) and log total of both.

    past, future: mean [B, T, H, D], free energy of the same shape, log total [B, T, H, D or 1], -inf where nothing is
    seen; `future` is in reversed time. beta [H, D]. Where neither sees anything, the results are those of the past.
    """
    mean, free, log_total = OPERATOR(*past, *future, beta)
    return mean, None if beta is None else free, log_total
