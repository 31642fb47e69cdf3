"""`femixer forecast cv`: forecasts from several cutoffs near the end of the data, and how good they were.

    window i of n: horizon + (n - i) step_size rows before the end of each series; the horizon after it is scored

The model is trained once, on what comes before all windows, or with --refit anew for each on what comes before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.models.forecast import ForecastConfig, Forecaster
from femixer.models.forecast.window import LEVELS, Kind, chosen_kind, column_names
from femixer.optional import require
from femixer.options import check, parse
from femixer.reporting import Table, as_markdown
from femixer.tasks.forecast.data import Series
from femixer.tasks.forecast.data.files import Section
from femixer.tasks.forecast.data.windows import Held
from femixer.tasks.forecast.fit import WIDER, Fitted, calibrated, fitted, window_sums
from femixer.tasks.forecast.model import Spec, check_possible
from femixer.tasks.forecast.task import Train, prepared, simple
from femixer.training import Results, RunOptions, atomic, distributed, show_table
from femixer.training.results import Record, holds_run, release

FRAME = "cv.csv"


@dataclass(frozen=True)
class CV(Train):
    """Cross-validate a forecaster: forecasts from several cutoffs, each scored on the rows that came after.

    The results folder gets cv.csv, with unique_id, ds, cutoff, y and the forecasts, and table.md, the errors of every
    window beside those of simple forecasts.
    """

    n_windows: int = 3
    """Windows, the last of which ends with the last row."""
    step_size: int | None = None
    """Rows from one window to the next, by default the horizon."""
    refit: bool = False
    """Train anew for every window, on all rows before it."""
    levels: tuple[float, ...] = ()
    """Prediction intervals in percent, e.g. 80 95, and their coverage."""
    intervals: Kind = "auto"
    """Method: quantiles of a model trained with them, or conformal, from errors on held-out windows."""
    run: RunOptions = field(default_factory=lambda: RunOptions(Path("results/forecast-cv")))


@dataclass(frozen=True)
class CVSpec(Spec):
    """With what decides the windows."""

    n_windows: int = 3
    step_size: int = 1
    refit: bool = False
    levels: tuple[float, ...] = ()
    intervals: str = "auto"


class Scored(NamedTuple):
    """Of one or more windows: sums of errors by window and model, and the frame."""

    sums: list[Tensor]
    """Of each window, added over series: number of values, squared and absolute errors."""
    rivals: dict[str, dict[str, float]]
    frame: Any
    record: Record


def main(args: Sequence[str]) -> int:
    command = parse(CV, args, "forecast cv", CV())
    return show_table(validated(command))


def validated(command: CV) -> Results:
    command.run.apply()
    step = command.horizon if command.step_size is None else command.step_size
    check(command.n_windows > 0, "n_windows", command.n_windows, "a whole number above 0")
    check(step > 0, "step_size", step, "a whole number above 0")
    held = Held(command.n_windows, step)
    check(command.horizon > 0, "horizon", command.horizon, "a whole number above 0")
    spec, series = prepared(command, held)
    own = {each.name: getattr(spec, each.name) for each in fields(Spec)}
    whole = CVSpec(
        **own,
        n_windows=held.windows,
        step_size=step,
        refit=command.refit,
        levels=command.levels,
        intervals=command.intervals,
    )
    parts = [(until(series, (held.windows - 1 - i) * step), Held(1, step)) for i in range(held.windows)]
    parts = parts if command.refit else [(series, held)]
    for part, windows in parts:
        check_possible(spec, part, windows)
    if command.levels:  # before any training; few windows may allow fewer levels
        possible = ForecastConfig(quantiles=[*command.quantiles] or None, conformal_levels=[*LEVELS])
        chosen_kind(possible, command.levels, command.intervals)
    results = Results("forecast cv", whole, command.run, [FRAME, *(f"window-{i + 1}" for i in range(held.windows))])
    if results.finished:
        return results
    scored = []
    for number, (part, windows) in enumerate(parts, 1):
        inner = results
        if command.refit:
            # The outer folder says whether this may be resumed; what is in it is its own.
            out = results.folder / f"window-{number}"
            begun = distributed.on_main(lambda out=out: holds_run(out))  # type: ignore[misc]
            inner = Results("forecast", spec, replace(command.run, out=out, resume=begun, overwrite=False))
        scored.append(score_windows(spec, part, windows, inner, command))
        if command.refit and distributed.is_main():
            release(inner.folder)
    distributed.on_main(lambda: finish(results, whole, scored))
    return results


def until(series: Series, dropped: int) -> Series:
    """Without so many last rows, of each series."""
    if not dropped:
        return series
    if not series.sections:
        rows: Any = slice(0, max(len(series.values) - dropped, 0))
        sections: tuple[Section, ...] = ()
    else:
        at, made, kept = 0, [], []
        for section in series.sections:
            left = section.rows - dropped
            if left > 0:
                made.append(section._replace(begin=at, end=at + left))
                kept.append(np.arange(section.begin, section.begin + left))
                at += left
        rows, sections = np.concatenate(kept) if kept else slice(0, 0), tuple(made)
    covariates = None if series.covariates is None else series.covariates[rows]
    return replace(
        series, dates=series.dates[rows], values=series.values[rows], covariates=covariates, sections=sections
    )


def score_windows(spec: Spec, series: Series, held: Held, results: Results, command: CV) -> Scored:
    made = fitted(spec, series, results, held)
    batch = WIDER * spec.training.batch
    calibrated(made.model, made.windows["validation"], batch)
    if command.levels:
        chosen_kind(made.model.config, command.levels, command.intervals)
    with torch.no_grad():
        sums = torch.cat(distributed.gather(window_sums(made.model, made.windows["test"], batch, "test")))[:, :3]
    # Every series has all windows, one series after the other.
    by_window = [*sums.unflatten(0, (-1, held.windows)).sum(0)]
    frame = distributed.on_main(lambda: forecasts(made, spec, series, held, command))
    return Scored(by_window, simple(spec, series, made, held), frame, made.record)


def forecasts(made: Fitted, spec: Spec, series: Series, held: Held, command: CV) -> Any:
    """unique_id, ds, cutoff, y, MODEL, MODEL-lo-80, ... of all windows; channels of a wide file are series here."""
    pandas = require("pandas", "series")
    parts, rows = [], held.rows(spec.horizon)
    long_enough = [section for section in series.sections if section.rows > rows]
    for number in range(held.windows):
        ahead = spec.horizon + (held.windows - 1 - number) * held.step
        if series.sections:
            parts.append(long_part(made.model, spec, series, long_enough, ahead, command))
        else:
            parts.append(wide_part(made.model, spec, series, ahead, command))
    frame = pandas.concat(parts, ignore_index=True)
    first = ["unique_id", "ds", "cutoff", "y"]
    return frame[[*first, *(name for name in frame.columns if name not in first)]]


def wide_part(model: Forecaster, spec: Spec, series: Series, ahead: int, command: CV) -> Any:
    """The forecast from the row that is `ahead` before the end, of each channel."""
    pandas, frame = require("pandas", "series"), series.frame()
    frame = frame[~frame.index.duplicated()]
    history = frame.iloc[: len(frame) - ahead].iloc[-spec.lookback :]
    future = frame if series.known else None
    found = model.predict(history, future, command.levels, command.intervals)
    truth, parts = frame.reindex(found.index), []
    for column in series.columns:
        own = found[column_names(column, command.levels)].set_axis(column_names(spec.model, command.levels), axis=1)
        part = own.rename_axis(index="ds").reset_index()
        parts.append(part.assign(unique_id=column, cutoff=history.index[-1], y=truth[column].to_numpy()))
    return pandas.concat(parts, ignore_index=True)


def long_part(
    model: Forecaster, spec: Spec, series: Series, sections: Sequence[Section], ahead: int, command: CV
) -> Any:
    """The same of each series."""
    pandas = require("pandas", "series")
    keys = [series.id_column, series.date_column]
    frame = series.frame()
    kept = [frame.iloc[s.begin : s.end - ahead].iloc[-spec.lookback :] for s in sections]
    history = pandas.concat(kept).reset_index()
    whole = frame.reset_index()
    found = model.predict(history, whole if series.known else None, command.levels, command.intervals)
    truth = whole.set_index(keys)[series.columns[0]]
    cutoffs = history.groupby(series.id_column, sort=False)[series.date_column].last()
    return found.assign(
        cutoff=found[series.id_column].map(cutoffs),
        y=truth.reindex(pandas.MultiIndex.from_frame(found[keys])).to_numpy(),
    ).rename(columns=dict(zip(keys, ("unique_id", "ds"), strict=True)))


def finish(results: Results, spec: CVSpec, scored: Sequence[Scored]) -> None:
    frame = require("pandas", "series").concat([each.frame for each in scored], ignore_index=True)
    atomic.write(results.folder / FRAME, frame.to_csv(index=False, lineterminator="\n"))
    results.finish(as_markdown(summary(spec, scored, frame)))


def summary(spec: CVSpec, scored: Sequence[Scored], frame: Any) -> Table:
    """Errors of each window and of all; and those of simple forecasts, of all."""
    sums = [own for each in scored for own in each.sums]
    # Windows of series that end at different times have different cutoffs: the first and the last are named.
    numbers = (
        frame.groupby("unique_id", sort=False)["cutoff"].transform(lambda own: own.rank(method="dense")).astype(int)
    )
    rows: list[list[str]] = []
    for number, own in enumerate(sums, 1):
        part = frame[numbers == number]
        cutoffs = sorted({*part["cutoff"]})
        named = str(cutoffs[0]) if len(cutoffs) == 1 else f"{cutoffs[0]} to {cutoffs[-1]}"
        rows.append([spec.model, named, *errors_of(own), *held_by(part, spec)])
    rows.append([spec.model, "all windows", *errors_of(torch.stack(sums).sum(0)), *held_by(frame, spec)])
    for name in scored[0].rivals:
        found = [each.rivals[name] for each in scored]
        if all(found):
            means = [sum(each[metric] for each in found) / len(found) for metric in ("mse", "mae")]
            rows.append([name, "all windows", *(f"{mean:.4f}" for mean in means), *("" for _ in spec.levels)])
    how = "trained anew for each" if spec.refit else "trained once, on the rows before"
    title = (
        f"{spec.dataset}: {spec.n_windows} windows of {spec.horizon} rows, {spec.step_size} rows apart, from "
        f"{spec.lookback} rows; {how}. Errors in units of the training rows' standard deviation."
    )
    columns = ("model", "cutoff", "MSE", "MAE", *(f"held by {level:g} %" for level in spec.levels))
    diverged = [each.record["diverged"] for each in scored if each.record["diverged"]]
    return Table.of(columns, rows, title, *[f"Training ended early: {told}." for told in diverged])


def errors_of(sums: Tensor) -> list[str]:
    count, squared, absolute = sums.tolist()
    return [f"{total / count:.4f}" if count else "" for total in (squared, absolute)]


def held_by(frame: Any, spec: CVSpec) -> list[str]:
    """The share of known values inside of each interval."""
    known, shares = frame[frame["y"].notna()], []
    for level in spec.levels:
        low, high = (known[name] for name in column_names(spec.model, [level])[1:])
        inside = (low <= known["y"]) & (known["y"] <= high)
        shares.append(f"{100 * inside.mean():.1f} %" if len(known) else "")
    return shares
