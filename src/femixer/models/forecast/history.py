"""What forecasts are made of, in the user's units: windows of different lengths side by side, and their scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from femixer.models.forecast.config import ForecastConfig
from femixer.options import check


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


def batches(windows: Sequence[Window]) -> Iterator[Sequence[Window]]:
    return (windows[first : first + BATCH] for first in range(0, len(windows), BATCH))


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
