"""What forecasts are made of: windows of series, gaps, normalisation over what was observed, scales, covariates; and
prediction intervals: levels in percent, of a model's quantiles or by split conformal prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.options import check

if TYPE_CHECKING:
    from femixer.models.forecast.forecaster import ForecastConfig


def fitted(history: Tensor, observed: Tensor | None, lookback: int) -> tuple[Tensor, Tensor | None]:
    """history and observed [B, L, C] as windows [B, lookback, C]: the last points, or unobserved ones on the left.

    What stands at unobserved places is replaced by 0, so that not even NaN reaches a sum.
    """
    missing = lookback - history.shape[1]
    if missing > 0:
        observed = torch.ones_like(history, dtype=torch.bool) if observed is None else observed
        history, observed = F.pad(history, (0, 0, missing, 0)), F.pad(observed, (0, 0, missing, 0))
    history = history[:, -lookback:]
    if observed is None:
        return history, None
    observed = observed[:, -lookback:]
    if not torch.compiler.is_compiling() and bool(observed.all()):
        return history, None
    return history.masked_fill(~observed, 0), observed


def filled(window: Tensor, observed: Tensor | None) -> Tensor:
    """The last observed value carried forward, the first one backward to the start; 0 in a channel without any."""
    if observed is None:
        return window
    index = torch.arange(window.shape[1], device=window.device)[:, None]
    last = index.expand_as(window).masked_fill(~observed, -1).cummax(1).values
    first = observed.long().argmax(1, keepdim=True)
    return window.gather(1, torch.where(last < 0, first, last))


def last_value(window: Tensor, observed: Tensor | None) -> Tensor:
    """[B, 1, C]: the last observed value; 0 in a channel without any."""
    if observed is None:
        return window[:, -1:]
    latest = observed.flip(1).long().argmax(1, keepdim=True)
    return window.gather(1, window.shape[1] - 1 - latest)


class Normalised(NamedTuple):
    """values [B, C, L] = (window - shift) / scale per window and channel; shift and scale [B, C, 1]."""

    values: Tensor
    shift: Tensor
    scale: Tensor

    def undone(self, forecast: Tensor) -> Tensor:
        """forecast [B, C, horizon] in the window's units, as [B, horizon, C]."""
        return torch.addcmul(self.shift, forecast, self.scale).transpose(1, 2)


def normalised_to_recent(window: Tensor, observed: Tensor | None, recent: int) -> Normalised:
    """Shift: mean of the last `recent` points; scale: standard deviation of the window (unbiased) + 1e-8.

    Of observed points only; where none of the recent ones was, the shift is the mean of the window. The values at
    unobserved places are 0.
    """
    values, reference, mean, squares, count = _moments(window, observed)
    scale = (squares / (count - 1).clamp_min(1)).sqrt() + 1e-8
    if observed is None:
        shift = values[..., -recent:].mean(-1, keepdim=True)
        return Normalised((values - shift) / scale, reference + shift, scale)
    seen = observed.transpose(1, 2)
    number = seen[..., -recent:].sum(-1, keepdim=True)
    shift = torch.where(number > 0, values[..., -recent:].sum(-1, keepdim=True) / number.clamp_min(1), mean)
    return Normalised(((values - shift) / scale).masked_fill(~seen, 0), reference + shift, scale)


def normalised(window: Tensor, observed: Tensor | None) -> Normalised:
    """RevIN without its affine map: shift by the mean, scale sqrt(variance + 1e-5), of observed points only.

    The values at unobserved places are those of the `filled` window.
    """
    values, reference, mean, squares, count = _moments(window, observed)
    scale = (squares / count + 1e-5).sqrt()
    if observed is not None:
        values = filled(window, observed).transpose(1, 2) - reference
    return Normalised((values - mean) / scale, reference + mean, scale)


class Moments(NamedTuple):
    """values [B, C, L] relative to the `reference`, 0 where unobserved; mean of the observed ones, the sum of squares
    around it, and how many they are."""

    values: Tensor
    reference: Tensor
    mean: Tensor
    squares: Tensor
    number: Tensor


def _moments(window: Tensor, observed: Tensor | None) -> Moments:
    """Relative to the last value: a constant is exactly 0 then, and a large level does not cost the variance digits."""
    reference = last_value(window, observed).transpose(1, 2)
    values = window.transpose(1, 2) - reference
    if observed is None:
        count = values.new_tensor(float(values.shape[-1]))
        mean = values.mean(-1, keepdim=True)
        return Moments(values, reference, mean, (values - mean).square().sum(-1, keepdim=True), count)
    missing = ~observed.transpose(1, 2)
    count = (~missing).sum(-1, keepdim=True).clamp_min(1)
    values = values.masked_fill(missing, 0)
    mean = values.sum(-1, keepdim=True) / count
    around = (values - mean).masked_fill(missing, 0)
    return Moments(values, reference, mean, around.square().sum(-1, keepdim=True), count)


class Window(NamedTuple):
    """What one forecast is made of, in the user's units, NaN where missing."""

    values: np.ndarray
    """[L, C]"""
    covariates: np.ndarray | None = None
    """[L, K + P], known and then past."""
    to_come: np.ndarray | None = None
    """[horizon, K]"""
    name: str | None = None
    """Of one of many series."""
    following: Any = None
    """Time stamps of the forecast."""


BATCH = 256
"""Windows that are forecast at once."""


def stacked(windows: Sequence[Window], config: ForecastConfig) -> np.ndarray:
    """The last rows of each [B, L, C], the same L for all, NaN before the first; checked."""
    length = min(config.lookback, max(len(window.values) for window in windows))
    out = np.full((len(windows), length, config.channels), np.nan)
    for number, (window, row) in enumerate(zip(windows, out, strict=True)):
        values = window.values[-length:].astype(np.float64) if length else window.values[:0]
        check(not np.isinf(values).any(), "history", "inf", "finite numbers, or NaN for missing ones")
        if config.missing_below is not None:
            values[values <= config.missing_below] = np.nan
        named = f" in {window.name}" if window.name is not None else f" in window {number}" if len(windows) > 1 else ""
        allowed = f"at least one of the last {config.lookback} that is not missing"
        check(not np.isnan(values).all(), "history", f"{len(values)} points{named}", allowed)
        row[length - len(values) :] = values
    return out


def scales(windows: Sequence[Window], config: ForecastConfig) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std by which the windows are scaled, [B or 1, 1, C]: the model's; of a model of many series those of the
    series, or of the window's own values if training did not know it."""
    if config.series_scale is None:
        channels = config.channels
        mean, std = config.scaler_mean or [0.0] * channels, config.scaler_std or [1.0] * channels
        return np.array(mean)[None, None], np.array(std)[None, None]
    own = [config.series_scale.get(str(w.name)) or mean_and_std(w.values) for w in windows]
    mean, std = np.array(own).T
    return mean[:, None, None], std[:, None, None]


def mean_and_std(values: np.ndarray) -> list[float]:
    """Of the values that are there; a constant keeps its scale, as scikit-learn's StandardScaler has it."""
    seen = values[~np.isnan(values)]
    if not len(seen):
        return [0.0, 1.0]
    eps = len(seen) * np.finfo(np.float64).eps
    constant = seen.var() <= eps * seen.var() + (eps * seen.mean()) ** 2
    return [float(seen[0]), 1.0] if constant else [float(seen.mean()), float(seen.std())]


def scaled_covariates(windows: Sequence[Window], config: ForecastConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """known [B, L + horizon, K] and past [B, L, P] for `forward`, of the same L as `stacked`; None without any."""
    count, known = len(config.covariates), len(config.known_covariates or ())
    if not count:
        return None, None
    length = min(config.lookback, max(len(window.values) for window in windows))
    mean, std = np.array(config.covariate_mean or [0.0] * count), np.array(config.covariate_std or [1.0] * count)
    both = np.full((len(windows), length + config.horizon, count), np.nan)
    for window, rows in zip(windows, both, strict=True):
        assert window.covariates is not None
        held = window.covariates[-length:]
        rows[length - len(held) : length] = held
        if window.to_come is not None:
            rows[length:, :known] = window.to_come
    scaled = (both - mean) / std
    return scaled[..., :known] if known else None, scaled[:, :length, known:] if count > known else None


class Covariates(NamedTuple):
    """Of windows of exactly the look-back: known [B, lookback + horizon, K], past [B, lookback, P]; K or P may be 0."""

    known: Tensor
    past: Tensor


def covariates_of(
    config: ForecastConfig, history: Tensor, known: Tensor | None, past: Tensor | None
) -> Covariates | None:
    """Checked against the history [B, L, C] and cut to the look-back as it is; None for a model without any."""
    if not config.known_covariates and not config.past_covariates:
        for name, given in (("known", known), ("past", past)):
            if given is not None:
                raise ValueError(f"{name} has shape {tuple(given.shape)}; this model was made without covariates")
        return None
    batch, length = history.shape[:2]
    horizon = config.horizon
    both = []
    for name, given, columns, ahead in (
        ("known", known, config.known_covariates, horizon),
        ("past", past, config.past_covariates, 0),
    ):
        shape = (batch, length + ahead, len(columns or ()))
        given = history.new_zeros(shape) if given is None and not columns else given
        if given is None or given.shape != shape:
            has = "is missing" if given is None else f"has shape {tuple(given.shape)}"
            raise ValueError(f"{name} {has}; allowed is {shape}: {', '.join(columns or ()) or 'no column'}")
        given = given.masked_fill(given.isnan(), 0)
        missing = config.lookback - length
        both.append(F.pad(given, (0, 0, missing, 0)) if missing > 0 else given[:, -config.lookback - ahead :])
    return Covariates(*both)


def patched(values: Tensor, patches: int, patch: int) -> Tensor:
    """[B, T, K] -> [B, patches, K patch]: patches that end with the last row, the first filled with zeros."""
    rows = F.pad(values.transpose(1, 2), (patches * patch - values.shape[1], 0))
    return torch.movedim(rows.unflatten(-1, (patches, patch)), 1, 2).flatten(2)


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
    shown = {name: ", ".join(f"{level:g}" for level in has) for name, has in own.items()}
    told = "; ".join(f"{name} {has}" if has else f"no {name}" for name, has in shown.items())
    kinds: tuple[Any, ...] = ("quantiles", "conformal") if kind == "auto" else (kind,)
    fitting = [name for name in kinds if {*levels} <= {*own[name]}]
    check(bool(fitting), "levels", list(levels), f"levels of one kind, of which this model has: {told}")
    return fitting[0]


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
