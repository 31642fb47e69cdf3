"""Prediction intervals: levels in percent, of a model's quantiles or by split conformal prediction.

Split conformal: of n held-out windows take the errors |forecast - truth| at a step of the horizon and a channel; the
width w of level 1 - a is the ceil((n + 1) (1 - a))-th smallest, and forecast +- w holds the truth with probability at
least 1 - a if the window to come is like those. Windows that overlap make n look larger than it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.models.forecast.config import ForecastConfig
from femixer.options import check

Kind = Literal["auto", "quantiles", "conformal"]
LEVELS = (50.0, 80.0, 90.0, 95.0, 99.0)
"""Those that every trained model has conformal widths for, in percent."""
NONE = -1.0
"""In place of a width where fewer errors are known than the level needs: the interval is infinite."""


class Prediction(NamedTuple):
    """forecast [..., horizon, C]; lower and upper [levels, ..., horizon, C], None where no levels are asked for."""

    forecast: np.ndarray
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None


def conformal_widths(errors: Tensor, levels: Sequence[float]) -> Tensor:
    """errors [N, horizon, C], NaN where unknown -> widths [levels, horizon, C], NONE where N is too small."""
    known = (~errors.isnan()).sum(0)
    ordered = errors.abs().masked_fill(errors.isnan(), math.inf).sort(0).values
    widths = []
    for level in levels:
        rank = ((known + 1).double() * level / 100 - 1e-9).ceil().long()
        place = (rank - 1).clamp(0, len(errors) - 1)
        width = ordered.gather(0, place[None]).squeeze(0)
        widths.append(width.masked_fill(rank > known, NONE))
    return torch.stack(widths)


def enough_for(level: float) -> int:
    """The fewest held-out errors of which a level has a width: the largest of n holds with n / (n + 1)."""
    return math.ceil(level / (100 - level) - 1e-9)


def pair(level: float) -> tuple[float, float]:
    """The quantiles between which a level lies: 80 -> 0.1, 0.9."""
    return round((100 - level) / 200, 6), round((100 + level) / 200, 6)


def quantile_levels(config: ForecastConfig) -> list[float]:
    """Levels that the model's quantiles have both ends of."""
    has = {round(q, 6) for q in config.quantiles or ()}
    return sorted(round(100 * (1 - 2 * q), 4) for q in has if q < 0.5 and round(1 - q, 6) in has)


def chosen_kind(config: ForecastConfig, levels: Sequence[float], kind: str) -> Literal["quantiles", "conformal"]:
    """auto: quantiles where the model has all that are asked for, conformal widths otherwise."""
    check(kind in ("auto", "quantiles", "conformal"), "intervals", kind, "auto, quantiles or conformal")
    check(len({*levels}) == len(levels), "levels", list(levels), "different ones")
    own = {"quantiles": quantile_levels(config), "conformal": [*(config.conformal_levels or ())]}
    told = "; ".join(f"{name} {shown(has)}" if has else f"no {name}" for name, has in own.items())
    kinds: tuple[Any, ...] = ("quantiles", "conformal") if kind == "auto" else (kind,)
    fitting = [name for name in kinds if {*levels} <= {*own[name]}]
    check(bool(fitting), "levels", list(levels), f"levels of one kind, of which this model has: {told}")
    return fitting[0]


def shown(levels: Sequence[float]) -> str:
    return ", ".join(f"{level:g}" for level in levels)


def column_names(name: str, levels: Sequence[float]) -> list[str]:
    """Of a forecast and its intervals: name, name-lo-80, name-hi-80, ..."""
    return [name, *(f"{name}-{end}-{level:g}" for level in levels for end in ("lo", "hi"))]


def columns_of(prediction: Prediction, channel: int) -> np.ndarray:
    """[horizon, 1 + 2 levels] of forecast [horizon, C]: the columns of `column_names`."""
    columns = [prediction.forecast[:, channel]]
    if prediction.lower is not None and prediction.upper is not None:
        for lower, upper in zip(prediction.lower, prediction.upper, strict=True):
            columns += [lower[:, channel], upper[:, channel]]
    return np.stack(columns, 1)


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
