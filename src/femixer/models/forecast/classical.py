"""Forecasts without a network, which others must beat: the last value, the last season, exponential smoothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from femixer.models.forecast.config import ForecastConfig
from femixer.models.forecast.forecaster import Forecaster
from femixer.models.forecast.window import filled, last_value
from femixer.optional import require


class Naive(Forecaster):
    """A forecaster without weights."""

    trainable = False

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        # transformers asks the parameters for device and dtype, and saves no model that has none at all.
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        self.post_init()


class LastValue(Naive):
    """The last observed value of each channel, for the whole horizon."""

    kind = "last-value"

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        return last_value(window, observed).expand(-1, self.config.horizon, -1)


class SeasonalNaive(Naive):
    """x_{t+h} = x_{t+h-k season} with the smallest k for which it was observed; the last value where it never was."""

    kind = "seasonal-naive"

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        season, horizon = self.config.season, self.config.horizon
        seasons = -(-window.shape[1] // season)
        before = seasons * season - window.shape[1]
        latest = window[:, -season:]
        if observed is not None or latest.shape[1] < season:
            # Places [seasons, phases] in the window, of the phases that are forecast; a season may be longer than both.
            phases = torch.arange(min(season, horizon), device=window.device)
            place = season * torch.arange(seasons, device=window.device)[:, None] + phases - before
            seen = (place >= 0)[None, :, :, None].expand(len(window), -1, -1, window.shape[2])
            place = place.clamp(min=0)
            seen = seen if observed is None else seen & observed[:, place]
            # [B, seasons, phases, C]: of each phase the latest season in which it was observed.
            at = seasons - 1 - seen.flip(1).long().argmax(1, keepdim=True)
            latest = window[:, place].gather(1, at).squeeze(1).where(seen.any(1), last_value(window, observed))
        return latest.repeat(1, -(-horizon // season), 1)[:, :horizon]


ROWS = 2000
"""Training rows, the last ones, of which the smoothing is estimated; further ones hardly change it."""
SERIES = 50
"""Of many series, those whose estimates count at most, evenly chosen."""
START = (0.5, 0.0, 0.0, 0.98)
"""Where nothing can be estimated: a constant, or too few rows."""


class ETS(Forecaster):
    """Additive error, damped additive trend, additive season (Hyndman's ETS(A,Ad,A)), each channel by itself:

        e_t = x_t - (l + phi b + s_{t-m});   l <- l + phi b + alpha e;   b <- phi b + beta e;   s_t <- s_{t-m} + gamma e
        forecast_h = l + (phi + ... + phi^h) b + s of its phase

    m: the season of the configuration. alpha, beta, gamma, phi of each channel maximise the likelihood of the training
    rows (statsmodels); the states start from the first two seasons of a window and follow it. Where a value is missing,
    e = 0.
    """

    kind = "ets"
    trainable = False

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        self.smoothing = nn.Parameter(torch.empty(config.channels, 4), requires_grad=False)
        self.post_init()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.smoothing.copy_(torch.tensor(START).expand_as(self.smoothing))

    def estimate(self, rows: Sequence[np.ndarray]) -> None:
        """Of training rows [T, C], or of those of many series: then the medians over series."""
        season = self.config.season
        chosen = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SERIES)).round().astype(int))]
        found = [[smoothing_of(column, season) for column in each[-ROWS:].T] for each in chosen]
        with torch.no_grad():
            self.smoothing.copy_(torch.tensor(np.median(found, 0)))

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        season = self.config.season if window.shape[1] >= 2 * self.config.season else 1
        alpha, beta, gamma, phi = self.smoothing.to(window.dtype).unbind(1)
        if season == 1:
            gamma = torch.zeros_like(gamma)
        level, trend, phases = started(filled(window, observed), season)
        for time, x in enumerate(window.unbind(1)):
            place = time % season
            level = level + phi * trend
            error = x - (level + phases[place])
            if observed is not None:
                error = error.masked_fill(~observed[:, time], 0)
            level, trend = level + alpha * error, phi * trend + beta * error
            phases[place] = phases[place] + gamma * error
        forecast = []
        for time in range(window.shape[1], window.shape[1] + self.config.horizon):
            trend = phi * trend
            level = level + trend
            forecast.append(level + phases[time % season])
        return torch.stack(forecast, 1)


def started(window: Tensor, season: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Level and trend [B, C] before the first row, and the season's phases, of the window's first two seasons."""
    if season == 1:
        level = window[:, 0]
        return level, torch.zeros_like(level), [torch.zeros_like(level)]
    first, second = window[:, :season], window[:, season : 2 * season]
    trend = (second.mean(1) - first.mean(1)) / season
    middle = torch.arange(season, device=window.device, dtype=window.dtype)[:, None] - (season - 1) / 2
    around = (
        torch.stack([part - part.mean(1, keepdim=True) for part in (first, second)]).mean(0) - trend[:, None] * middle
    )
    return first.mean(1) - trend * (season + 1) / 2, trend, [*around.unbind(1)]


def smoothing_of(values: np.ndarray, season: int) -> tuple[float, float, float, float]:
    """alpha, beta, gamma and phi of one column, its gaps filled with the value before."""
    seen = ~np.isnan(values)
    if seen.sum() < 10 or np.ptp(values[seen]) < 1e-9:
        return START
    values = values[np.maximum.accumulate(np.where(seen, np.arange(len(values)), int(seen.argmax())))]
    seasonal = season > 1 and len(values) >= max(2 * season, 10 + 2 * (season // 2))
    smoother = require("statsmodels.tsa.exponential_smoothing.ets", "series").ETSModel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a flat likelihood has no clear maximum
        found = smoother(
            values,
            error="add",
            trend="add",
            damped_trend=True,
            seasonal="add" if seasonal else None,
            seasonal_periods=season if seasonal else None,
            initialization_method="heuristic",
        ).fit(disp=False)
    by_name = dict(zip(found.param_names, found.params, strict=True))
    names = ("smoothing_level", "smoothing_trend", "smoothing_seasonal", "damping_trend")
    estimates = [float(by_name.get(name, 0.0)) for name in names]
    return tuple(estimates) if np.isfinite(estimates).all() else START  # type: ignore[return-value]
