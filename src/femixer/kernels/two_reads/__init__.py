"""Two reads as one: mean, free energy and total weight of a token's past and of its future together.

    w = exp(log_total), w' of the future:   mean = (w mu + w' mu') / (w + w'),   log_total = log(w + w')
    free = log((w exp(beta F) + w' exp(beta F')) / (w + w')) / beta

Axes: B batch, T tokens, H heads, D value channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.operator import declared


@declared(outputs=3, left_to_torch="a few passes over memory beside two scans")
def two_reads(
    mean: Tensor,
    free: Tensor | None,
    log_total: Tensor,
    later_mean: Tensor,
    later_free: Tensor | None,
    later_total: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """mean, free energy (empty without beta) and log total of both.

    Of the past, and of the future in reversed time: mean [B, T, H, D], free energy of the same shape, log total
    [B, T, H, D or 1], -inf where nothing is seen. beta [H, D]. Where neither sees anything, the results are those of
    the past.
    """
    both = torch.empty_like(mean, memory_format=torch.contiguous_format)
    total = torch.empty_like(log_total, memory_format=torch.contiguous_format)
    return both, mean.new_empty(0) if free is None else free.new_empty(free.shape), total


OPERATOR = two_reads.operator


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """In torch's operations. log(w e^(beta F) + w' e^(beta F')) is taken relative to the larger F."""
    mean, free, log_total, later_mean, later_free, later_total, beta = arguments
    dtype = mean.dtype
    # A logarithm divided by beta needs the digits.
    mean, log_total = mean.double(), log_total.double()
    later_mean, theirs = later_mean.double().flip(1), later_total.double().flip(1)
    # A padding row is empty on both sides; any finite number does there.
    ours = log_total.masked_fill(log_total == -torch.inf, 0)
    empty = theirs == -torch.inf
    odds = (theirs.masked_fill(empty, 0) - ours).masked_fill(empty, -torch.inf)
    both = mean + torch.sigmoid(odds) * (later_mean - mean)
    total = ours + F.softplus(odds)
    if beta is None or free is None or later_free is None:
        return both.to(dtype), mean.new_empty(0, dtype=dtype), total.to(arguments[2].dtype)
    beta, free = beta.double(), free.double()
    other = torch.where(empty, free, later_free.double().flip(1))
    rise = beta * (other - free)
    ours_above = rise <= 0
    above, below = torch.where(ours_above, free, other), torch.where(ours_above, rise, -rise)
    finite = odds.masked_fill(empty, 0)
    log_share, log_rest = F.logsigmoid(finite), F.logsigmoid(-finite)
    high, low = torch.where(ours_above, log_rest, log_share), torch.where(ours_above, log_share, log_rest)
    mixed = torch.where(empty, free, above + torch.logaddexp(high, low + below) / beta)
    return both.to(dtype), mixed.to(arguments[1].dtype), total.to(arguments[2].dtype)


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """The formula in float64."""
    mean, free, log_total, later_mean, later_free, later_total, beta = arguments
    mean, log_total = mean.double(), log_total.double()
    later_mean, later_total = later_mean.double().flip(1), later_total.double().flip(1)
    # Of two reads of nothing the first is taken.
    log_total = torch.where(log_total == -torch.inf, 0.0, log_total)
    seen = later_total > -torch.inf
    both = torch.where(seen, torch.logaddexp(log_total, torch.where(seen, later_total, 0.0)), log_total)
    ours, theirs = log_total - both, torch.where(seen, later_total, 0.0) - both
    result = ours.exp() * mean + torch.where(seen, theirs.exp(), 0.0) * torch.where(seen, later_mean, 0.0)
    if free is None or later_free is None or beta is None:
        return result, mean.new_empty(0), both
    beta, free = beta.double(), free.double()
    other = torch.where(seen, later_free.double().flip(1), free)
    mixed = torch.logaddexp(ours + beta * free, theirs + beta * other) / beta
    return result, torch.where(seen, mixed, free), both


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def case(
        length: int = 7, *, per_head: bool = False, beta: float | None = 1.0, size: float = 1.0, odds: float = 3.0
    ) -> tuple[Any, ...]:
        shape = 2, length, 3, 5
        mean, rise, later_mean, later_rise = size * torch.randn(4, *shape)
        totals = odds * torch.randn(2, *shape[:3], 1 if per_head else 5)
        totals[1, :, -1] = -torch.inf  # nothing follows the last token, which is the first in reversed time
        totals[1, :, :1] = -torch.inf
        if beta is None:
            return mean, None, totals[0], later_mean, None, totals[1], None
        free, later_free = mean + rise.abs(), later_mean + later_rise.abs()
        return mean, free, totals[0], later_mean, later_free, totals[1], beta * (0.5 + torch.rand(3, 5))

    return {
        "per channel": case(),
        "per head": case(per_head=True),
        "one token": case(1),
        "mean": case(beta=None, per_head=True),
        "cold": case(beta=0.03),
        "large": case(size=300.0),
        "one outweighs the other": case(odds=60.0, size=30.0),
    }
