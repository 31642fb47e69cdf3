"""Several quantiles of a forecast at once: outputs that cannot cross, and the loss whose minimum they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ascending(centre: Tensor, raw: Tensor) -> Tensor:
    """centre [...], raw [..., Q] -> [..., Q], strictly ascending along the last axis.

    q_m = centre + raw_m at the middle m = Q // 2;   q_{i+1} = q_i + softplus(raw_{i+1}) above, and likewise below.
    """
    middle = raw.shape[-1] // 2
    at = centre[..., None] + raw[..., middle : middle + 1]
    below = F.softplus(raw[..., :middle]).flip(-1).cumsum(-1).flip(-1)
    above = F.softplus(raw[..., middle + 1 :]).cumsum(-1)
    return torch.cat([at - below, at, at + above], -1)


def pinball(forecast: Tensor, target: Tensor, quantiles: list[float]) -> Tensor:
    """[...]: the mean over quantiles p of max(p e, (p - 1) e) with e = target - forecast_p; forecast [..., Q]."""
    p = torch.tensor(quantiles, dtype=forecast.dtype, device=forecast.device)
    error = target[..., None] - forecast
    return torch.maximum(p * error, (p - 1) * error).mean(-1)


def pinball_error(forecast: Tensor, target: Tensor, observed: Tensor | None, quantiles: list[float]) -> Tensor:
    """Sum over windows of the mean over a window's (observed) points, as `squared_error`."""
    # What stands at unobserved places may be NaN, whose gradient a mask after the fact would not take away.
    known = torch.ones_like(target, dtype=torch.bool) if observed is None else observed
    loss = pinball(forecast, target.masked_fill(~known, 0), quantiles).masked_fill(~known, 0)
    return (loss.flatten(1).sum(1) / known.flatten(1).sum(1).clamp_min(1)).sum()
