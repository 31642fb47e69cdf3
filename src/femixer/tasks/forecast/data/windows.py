"""The windows of the protocol: splits by rows, scaling by the training rows, and every window of each.

Of long files each series has splits and a scale of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.models.forecast.window import mean_and_std
from femixer.options import check, check_positive
from femixer.tasks.forecast.data import KNOWN, RATIOS, Series
from femixer.tasks.forecast.data.files import Section

SPLITS = ("train", "validation", "test")


class Batch(NamedTuple):
    """history [B, L, C] and future [B, H, C], scaled, 0 where missing; bool masks of what is there, None if all is.

    covariates: known [B, L + H, K] and past [B, L, P], those of them that there are.
    """

    history: Tensor
    future: Tensor
    observed: Tensor | None = None
    future_observed: Tensor | None = None
    covariates: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Scaling:
    """(value - mean) / std per channel [C]; of a long file [series, 1]. covariate_mean, covariate_std: [K + P]."""

    mean: np.ndarray
    std: np.ndarray
    covariate_mean: np.ndarray
    covariate_std: np.ndarray


@dataclass(frozen=True)
class Held:
    """Windows of cross-validation, which replace the test split: the last ends with the last row."""

    windows: int
    step: int

    def rows(self, horizon: int) -> int:
        """From the first row that is forecast."""
        return (self.windows - 1) * self.step + horizon


@dataclass(frozen=True)
class Windows:
    """Of one split: number i has its future at rows places[i] ... places[i] + horizon - 1 and its history before."""

    values: Tensor
    """[T, C] of the whole series, scaled; of several, one after the other."""
    observed: Tensor | None
    places: Tensor
    lookback: int
    horizon: int
    covariates: Tensor | None = None
    """[T, K + P], scaled, 0 where missing."""
    known: int = 0
    """K."""
    moments: np.ndarray | None = None
    """Of a long file: the time at which each window's future begins."""

    @property
    def count(self) -> int:
        return len(self.places)

    def take(self, numbers: Tensor) -> Batch:
        """Of all windows only these are copied."""
        history, future = self._cut(self.values, numbers)
        seen, seen_future = (None, None) if self.observed is None else self._cut(self.observed, numbers)
        if self.covariates is None:
            return Batch(history, future, seen, seen_future)
        so_far, to_come = self._cut(self.covariates, numbers)
        both = {"known": torch.cat([so_far, to_come], 1)[..., : self.known], "past": so_far[..., self.known :]}
        there = {name: values for name, values in both.items() if values.shape[-1]}
        return Batch(history, future, seen, seen_future, there)

    def _cut(self, series: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        every = series.unfold(0, self.lookback + self.horizon, 1).transpose(1, 2)  # a view [N, L + H, C]
        taken = every[self.places[numbers].to(series.device) - self.lookback]
        return taken[:, : self.lookback], taken[:, self.lookback :]


def borders(series: Series, held: Held | None = None, horizon: int = 0) -> dict[str, tuple[int, int]]:
    """First and last row (exclusive) of each split of a wide file."""
    rows, known = len(series.values), KNOWN.get(series.name)
    if held is not None:
        ends = before(rows - held.rows(horizon), rows)
    elif known is None or known.borders is None:
        train, test = (int(rows * share) for share in RATIOS)
        ends = (train, rows - test, rows)
    else:
        ends = known.borders
        if rows < ends[-1]:
            told = f"has its splits in the first {ends[-1]} rows, and this file has {rows} rows"
            raise ValueError(f"{series.name} {told}")
    return dict(zip(SPLITS, zip((0, *ends), ends, strict=False), strict=True))


def before(first: int, rows: int) -> tuple[int, int, int]:
    """Where splits end if the test split begins at row `first`: the rows before in the proportion of RATIOS."""
    train = int(first * RATIOS[0] / (1 - RATIOS[1]) + 1e-9)
    return train, first, rows


def scaling_of(series: Series, horizon: int = 1, held: Held | None = None) -> Scaling:
    """Mean and standard deviation (over n) of the training rows; a channel that is constant there keeps its scale."""

    def of_columns(names: Sequence[str], rows: np.ndarray) -> np.ndarray:
        found = [scale_of(series, f"the column {n!r}", column) for n, column in zip(names, rows.T, strict=True)]
        return np.array(found).reshape(-1, 2).T

    if series.sections:
        train = [slice(s.begin, s.begin + section_ends(s, horizon, held)[0]) for s in series.sections]
        named = zip((s.name for s in series.sections), train, strict=True)
        own = np.array([scale_of(series, f"the series {name!r}", series.values[rows]) for name, rows in named])
        mean, std = own.T[..., None]
    else:
        train = [slice(*borders(series, held, horizon)["train"])]
        mean, std = of_columns(series.columns, series.values[train[0]])
    given = np.zeros((0, 0)) if series.covariates is None else np.concatenate([series.covariates[of] for of in train])
    return Scaling(mean, std, *of_columns((*series.known, *series.past), given))


def scale_of(series: Series, what: str, values: np.ndarray) -> list[float]:
    """Mean and deviation of training rows; without a value there, or with too large ones, an error that names them."""
    seen = values[~np.isnan(values)]
    if len(values) and not len(seen):
        raise ValueError(
            f"{series.name}: {what} has no value in the {len(values)} training rows; choose --columns without it"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        finite = not len(seen) or np.isfinite(seen.var())
    if not finite:
        raise ValueError(
            f"{series.name}: {what} has values up to {np.abs(seen).max():.3g}, too large to scale: their deviation is "
            "not a finite number; give it in a larger unit, or choose --columns without it"
        )
    return mean_and_std(values)


def section_ends(section: Section, horizon: int, held: Held | None) -> tuple[int, int, int]:
    """Rows of one of many series where its training, validation and test end: by RATIOS, and at least a horizon for the
    latter two. Too short a series has no row for training."""
    rows = section.rows
    if held is None:
        test, rest = max(int(rows * RATIOS[1]), horizon), rows - int(rows * RATIOS[0]) - int(rows * RATIOS[1])
        validation = max(rest, horizon)
    else:
        test = held.rows(horizon)
        validation = max(rows - test - before(rows - test, rows)[0], horizon)
    train = rows - test - validation
    return (train, rows - test, rows) if train > horizon else (max(rows - test, 0), max(rows - test, 0), rows)


def windows(
    series: Series, lookback: int, horizon: int, device: torch.device | str = "cpu", held: Held | None = None
) -> tuple[Mapping[str, Windows], Scaling]:
    """Every window of each split, with stride 1: those of validation and test reach back into the rows before. held:
    windows of cross-validation in place of the test split."""
    scaling = scaling_of(series, horizon, held)
    placed = places_of(series, lookback, horizon, held)
    lengths = [section.rows for section in series.sections]
    mean, std = (np.repeat(x, lengths, 0) if lengths else x for x in (scaling.mean, scaling.std))
    scaled = (series.values - mean) / std
    with np.errstate(over="ignore"):
        too_large = np.argwhere(np.isinf(scaled.astype(np.float32)))
    for row, channel in too_large[:1]:
        raise ValueError(
            f"{series.name}: the column {series.columns[channel]!r} has the value {series.values[row, channel]:.3g} in "
            f"row {row + 1}, {scaled[row, channel]:.3g} deviations of the training rows from their mean: too large"
        )
    scaled = placed.spread(scaled)
    missing = np.isnan(scaled)
    numbers = np.where(missing, 0.0, scaled).astype(np.float32)
    values = torch.from_numpy(numbers).to(device)
    observed = torch.from_numpy(~missing).to(device) if missing.any() else None
    covariates = None
    if series.covariates is not None:
        rows = placed.spread((series.covariates - scaling.covariate_mean) / scaling.covariate_std)
        covariates = torch.from_numpy(np.nan_to_num(rows).astype(np.float32)).to(device)
    times = placed.spread(series.dates.as_unit("s").asi8[:, None])[:, 0] if series.sections else None
    shared: dict[str, Any] = {"covariates": covariates, "known": len(series.known)}
    split = {}
    for name, where in placed.places.items():
        moments = None if times is None else times[where]
        split[name] = Windows(values, observed, torch.from_numpy(where), lookback, horizon, moments=moments, **shared)
    return split, scaling


class Placed(NamedTuple):
    """Where windows lie in rows that stand one series after the other, with empty rows before short ones."""

    places: Mapping[str, np.ndarray]
    """Split -> the rows at which futures begin."""
    rows: np.ndarray | None = None
    """[T] of the series' rows in the new order; None: all stay."""
    total: int = 0

    def spread(self, values: np.ndarray) -> np.ndarray:
        if self.rows is None:
            return values
        out = np.full((self.total, values.shape[1]), np.nan)
        out[self.rows] = values
        return out


def places_of(series: Series, lookback: int, horizon: int, held: Held | None = None) -> Placed:
    if series.sections:
        return long_places(series, lookback, horizon, held)
    ranges = counted(series, lookback, horizon, held)
    step = {"test": 1 if held is None else held.step}
    return Placed({split: first + np.arange(count) * step.get(split, 1) for split, (first, count) in ranges.items()})


def long_places(series: Series, lookback: int, horizon: int, held: Held | None = None) -> Placed:
    """Windows of every series that is long enough. Those of a series without a full look-back for training reach into
    empty rows before its first."""
    check_positive(lookback=lookback, horizon=horizon)
    places: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    rows, at = [], 0
    for section in series.sections:
        train, validation, end = section_ends(section, horizon, held)
        padding = 0 if train >= lookback + horizon else lookback
        begin = at + padding
        rows.append(begin + np.arange(section.rows))
        first = lookback if padding == 0 else max(1, min(horizon, train - horizon))
        if train < validation:  # otherwise too short to be trained on
            places["train"].append(begin + np.arange(first, train - horizon + 1))
            places["validation"].append(begin + np.arange(train, validation - horizon + 1))
        if held is not None:
            cutoffs = validation + np.arange(held.windows) * held.step
            places["test"].append(begin + cutoffs[(cutoffs > 0) & (validation > 0)])
        elif train < validation:
            places["test"].append(begin + np.arange(validation, end - horizon + 1))
        at = begin + section.rows
    found = {split: np.concatenate([np.zeros(0, dtype=np.int64), *own]) for split, own in places.items()}
    longest, needed = max(section.rows for section in series.sections), rows_needed(horizon, held)
    told = f"less: a series needs {needed} rows for horizon {horizon}, and the longest of {series.name} has {longest}"
    for split, places_of_split in found.items():
        check(len(places_of_split) > 0, "horizon", horizon, f"{told} ({split} split)")
    return Placed(found, np.concatenate(rows), at)


def training_rows(series: Series, horizon: int, held: Held | None = None) -> list[np.ndarray]:
    """Scaled training rows [T, C], of each series of several."""
    scaling = scaling_of(series, horizon, held)
    if not series.sections:
        return [(series.values[slice(*borders(series, held, horizon)["train"])] - scaling.mean) / scaling.std]
    rows = []
    for number, section in enumerate(series.sections):
        train, validation, _ = section_ends(section, horizon, held)
        if train < validation:
            own = series.values[section.begin : section.begin + train]
            rows.append((own - scaling.mean[number]) / scaling.std[number])
    return rows


def too_short(series: Series, horizon: int, held: Held | None = None) -> list[str]:
    """Names of series that give no windows for training."""
    ends = ((section.name, section_ends(section, horizon, held)) for section in series.sections)
    return [name for name, (train, validation, _) in ends if train == validation]


def rows_needed(horizon: int, held: Held | None) -> int:
    """Rows of one of many series from which on there are windows for training, validation and test."""
    return (horizon if held is None else held.rows(horizon)) + 2 * horizon + 1


def counted(series: Series, lookback: int, horizon: int, held: Held | None = None) -> dict[str, tuple[int, int]]:
    """Of a wide file: the first row that a window of each split forecasts, and how many windows there are."""
    check_positive(lookback=lookback, horizon=horizon)
    ranges = {}
    for split, (begin, end) in borders(series, held, horizon).items():
        if end - begin < 1 or (split == "train" and end < 2):
            raise ValueError(f"{series.name} has {len(series.values)} rows, too few for a {split} split")
        rows = f"{series.name} has {end - begin} rows in its {split} split"
        first = lookback if split == "train" else begin
        most = end - begin - (split == "train")  # a window of the first rows has at least one before it
        check(horizon <= most, "horizon", horizon, f"at most {most}: {rows}")
        check(first + horizon <= end, "lookback", lookback, f"at most {end - horizon} with horizon {horizon}: {rows}")
        ranges[split] = (first, end - first - horizon + 1)
        if held is not None and split == "test":
            check(begin >= lookback, "lookback", lookback, f"at most {begin}, the rows before the first window")
            ranges[split] = (begin, held.windows)
    return ranges
