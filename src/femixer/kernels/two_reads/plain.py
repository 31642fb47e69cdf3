"""Two reads as one in torch's operations. log(w e^(beta F) + w' e^(beta F')) is taken relative to the larger F."""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    mean: Tensor,
    free: Tensor | None,
    log_total: Tensor,
    later_mean: Tensor,
    later_free: Tensor | None,
    later_total: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, ...]:
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
        return both.to(dtype), mean.new_empty(0, dtype=dtype), total.to(dtype)
    beta, free = beta.double(), free.double()
    other = torch.where(empty, free, later_free.double().flip(1))
    rise = beta * (other - free)
    ours_above = rise <= 0
    above, below = torch.where(ours_above, free, other), torch.where(ours_above, rise, -rise)
    finite = odds.masked_fill(empty, 0)
    log_share, log_rest = F.logsigmoid(finite), F.logsigmoid(-finite)
    high, low = torch.where(ours_above, log_rest, log_share), torch.where(ours_above, log_share, log_rest)
    mixed = torch.where(empty, free, above + torch.logaddexp(high, low + below) / beta)
    return both.to(dtype), mixed.to(dtype), total.to(dtype)
