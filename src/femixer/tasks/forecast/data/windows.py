"""The windows of the protocol: splits by rows, scaling by the training rows, and every window of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.options import check
from femixer.tasks.forecast.data import KNOWN, RATIOS, Series

SPLITS = ("train", "validation", "test")


class Batch(NamedTuple):
    """history [B, L, C] and future [B, H, C], scaled, 0 where missing; bool masks of what is there, None if all is."""

    history: Tensor
    future: Tensor
    observed: Tensor | None = None
    future_observed: Tensor | None = None


@dataclass(frozen=True)
class Scaling:
    """(value - mean) / std per channel."""

    mean: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Windows:
    """Of one split: number i has its future at rows first + i ... first + i + horizon - 1 and its history before."""

    values: Tensor
    """[T, C] of the whole series, scaled."""
    observed: Tensor | None
    first: int
    count: int
    lookback: int
    horizon: int

    def take(self, numbers: Tensor) -> Batch:
        """Of all windows only these are copied."""
        history, future = self._cut(self.values, numbers)
        masks = (None, None) if self.observed is None else self._cut(self.observed, numbers)
        return Batch(history, future, *masks)

    def _cut(self, series: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        every = series.unfold(0, self.lookback + self.horizon, 1).transpose(1, 2)  # a view [N, L + H, C]
        taken = every[numbers.to(series.device) + (self.first - self.lookback)]
        return taken[:, : self.lookback], taken[:, self.lookback :]


def borders(series: Series) -> dict[str, tuple[int, int]]:
    """First and last row (exclusive) of each split."""
    rows, known = len(series.values), KNOWN.get(series.name)
    if known is None or known.borders is None:
        train, test = (int(rows * share) for share in RATIOS)
        ends = (train, rows - test, rows)
    else:
        ends = known.borders
        if rows < ends[-1]:
            raise ValueError(
                f"{series.name} has its splits in the first {ends[-1]} rows, and this file has {rows} rows"
            )
    return dict(zip(SPLITS, zip((0, *ends), ends, strict=False), strict=True))


def scaling_of(series: Series) -> Scaling:
    """Mean and standard deviation (over n) of the training rows; a channel that is constant there keeps its scale.

    A channel without a value there, or with values whose squares are too large, is an error that names it.
    """
    rows = series.values[slice(*borders(series)["train"])]
    mean, std = np.zeros(rows.shape[1]), np.ones(rows.shape[1])
    for channel, column in enumerate(rows.T):
        seen, name = column[~np.isnan(column)], series.columns[channel]
        if not len(seen):
            raise ValueError(
                f"{series.name}: the column {name!r} has no value in the {len(rows)} training rows; choose --columns "
                "without it"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            variance = seen.var()
        if not np.isfinite(variance):
            largest = np.abs(seen).max()
            raise ValueError(
                f"{series.name}: the column {name!r} has values up to {largest:.3g}, too large to scale: their "
                "deviation is not a finite number; give it in a larger unit, or choose --columns without it"
            )
        constant = variance <= rounding_of(seen)
        mean[channel], std[channel] = (seen[0], 1.0) if constant else (seen.mean(), seen.std())
    return Scaling(mean, std)


def rounding_of(values: np.ndarray) -> float:
    """The variance that rounding may give to equal values, as scikit-learn's StandardScaler has it."""
    eps = len(values) * np.finfo(np.float64).eps
    return float(eps * values.var() + (eps * values.mean()) ** 2)


def windows(
    series: Series, lookback: int, horizon: int, device: torch.device | str = "cpu"
) -> tuple[Mapping[str, Windows], Scaling]:
    """Every window of each split, with stride 1: those of validation and test reach back into the rows before."""
    scaling = scaling_of(series)
    ranges = counted(series, lookback, horizon)
    scaled = (series.values - scaling.mean) / scaling.std
    missing = np.isnan(scaled)
    with np.errstate(over="ignore"):
        numbers = np.where(missing, 0.0, scaled).astype(np.float32)
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        row, channel = bad[0]
        raise ValueError(
            f"{series.name}: the column {series.columns[channel]!r} has the value {series.values[row, channel]:.3g} in "
            f"row {row + 1}, {scaled[row, channel]:.3g} deviations of the training rows from their mean: too large"
        )
    values = torch.from_numpy(numbers).to(device)
    observed = torch.from_numpy(~missing).to(device) if missing.any() else None
    return {s: Windows(values, observed, *where, lookback, horizon) for s, where in ranges.items()}, scaling


def counted(series: Series, lookback: int, horizon: int) -> dict[str, tuple[int, int]]:
    """The first row that a window of each split forecasts, and how many windows there are: at least one."""
    check(lookback > 0, "lookback", lookback, "a whole number above 0")
    check(horizon > 0, "horizon", horizon, "a whole number above 0")
    ranges = {}
    for split, (begin, end) in borders(series).items():
        if end - begin < 1 or (split == "train" and end < 2):
            raise ValueError(f"{series.name} has {len(series.values)} rows, too few for a {split} split")
        rows = f"{series.name} has {end - begin} rows in its {split} split"
        first = lookback if split == "train" else begin
        check(horizon <= end - begin, "horizon", horizon, f"at most {end - begin}: {rows}")
        check(first + horizon <= end, "lookback", lookback, f"at most {end - horizon} with horizon {horizon}: {rows}")
        ranges[split] = (first, end - first - horizon + 1)
    return ranges
