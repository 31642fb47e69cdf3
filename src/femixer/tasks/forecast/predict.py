"""Forecasts with their dates. `femixer forecast predict`: what a trained model expects next. `femixer forecast cv`:
forecasts from several cutoffs near the end of the data, and how good they were.

    window i of n: horizon + (n - i) step_size rows before the end of each series; the horizon after it is scored

The model is trained once, on what comes before all windows, or with --refit anew for each on what comes before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.models.files import without_bars
from femixer.models.forecast import ForecastConfig, Forecaster
from femixer.models.forecast.frames import is_date_name, regular
from femixer.models.forecast.window import LEVELS, Kind, chosen_kind, column_names
from femixer.optional import require
from femixer.options import Count, check, check_options, model_named, parse
from femixer.reporting import Table, as_markdown
from femixer.reporting.figures import save
from femixer.reporting.writers import in_csv
from femixer.tasks.forecast.data import ABOUT_PACKAGED, PACKAGED, Reading, Series, read, read_future
from femixer.tasks.forecast.data.windows import Held
from femixer.tasks.forecast.fit import WIDER, Fitted, Outlook, calibrated, fitted, forecast_figure, window_sums
from femixer.tasks.forecast.model import Spec, check_possible
from femixer.tasks.forecast.task import Train, prepared, simple
from femixer.tasks.runner import told
from femixer.training import Results, RunOptions, atomic, distributed, show_table
from femixer.training.results import MODEL, Record, check_no_run, holds_run, release

FORECAST, FIGURE = "forecast.csv", "figure.png"
DRAWN = 3
"""Horizons of history in the figure."""


@dataclass(frozen=True)
class Predict:
    """Forecast the rows that follow a series, with a model of `femixer forecast train`.

    Writes forecast.csv, with the dates and columns of the data, and figure.png: the history, the forecast, and what
    came, where the data have it. Of a model of many series (unique_id, ds, y), the rows that follow each of them.
    """

    model: Path = Path("results/forecast")
    """Results folder of `femixer forecast train`, or a model's own folder."""
    data: str = PACKAGED
    """A CSV or parquet file with the columns that the model was trained on, or folder/NAME of one."""
    start: str | None = None
    """First date to forecast, from the rows before it; by default the one after the last row."""
    future: str | None = None
    """A file with the known covariates of the dates to forecast, if the model has any.
    With --start, by default --data."""
    levels: tuple[float, ...] = ()
    """Prediction intervals in percent, as 80 95: columns NAME-lo-80, NAME-hi-80 and so on."""
    intervals: Kind = "auto"
    """Method: quantiles of a model trained with them, or conformal, from errors on held-out windows."""
    reading: Reading = field(default_factory=Reading)
    out: Path = Path("results/prediction")
    """Folder of the two files."""


def load(path: Path) -> Forecaster:
    folder = path / MODEL if (path / MODEL).is_dir() else path
    fits = (folder / "model.safetensors").is_file() and (folder / "config.json").is_file()
    check(fits, "model", str(path), "a results folder of `femixer forecast train`, or the model/ in it")
    with without_bars():
        return Forecaster.from_pretrained(folder)


def as_trained(reading: Reading, config: ForecastConfig) -> Reading:
    """Read the columns that the model knows, unless told otherwise."""
    date = config.date_column if config.date_column and not is_date_name(config.date_column) else None
    own = {"columns": config.columns, "known": config.known_covariates, "past": config.past_covariates}
    for name, has in own.items():
        given = getattr(reading, name)
        check(not given, name, given, f"none: the model has its own, {', '.join(has or ()) or 'none'}")
    return replace(
        reading,
        date_column=reading.date_column or date,
        date_format=reading.date_format or config.date_format,
        missing_below=config.missing_below if reading.missing_below is None else reading.missing_below,
        columns=tuple(config.columns or ()),
        known=tuple(config.known_covariates or ()),
        past=tuple(config.past_covariates or ()),
    )


def as_date(start: str, dates: Any) -> Any:
    """The first date to forecast, within the time zone of the dates."""
    pandas = require("pandas", "forecast")
    try:
        first = pandas.Timestamp(start)
    except ValueError:
        first = pandas.NaT
    check(first is not pandas.NaT, "start", start, "a date, as 2016-07-01 or 2016-07-01 12:00")
    fits = first.tz is None or dates.tz is not None
    check(fits, "start", start, f"a date without a time zone, as those of the data: {dates[-1]}")
    return first.tz_localize(dates.tz) if dates.tz is not None and first.tz is None else first


def history_of(frame: Any, config: ForecastConfig, start: str | None, name: str = "") -> Any:
    """The rows of one series that the forecast is made of; rows missing before its start have no values."""
    pandas = require("pandas", "forecast")
    frame = frame[~frame.index.duplicated()]
    if start is None:
        return frame.iloc[-config.lookback :]
    first, last = as_date(start, frame.index), frame.index[-1]
    allowed = f"a date after {frame.index[0]}{name}, and at most the one that follows {last}"
    check(first > frame.index[0], "start", start, allowed)
    history = frame[frame.index < first].iloc[-config.lookback :]
    frequency, known = regular(history.index, config.frequency)
    # The first is the last row, the second what would be forecast without the rows missing before the start.
    steps = pandas.date_range(known[-1], periods=2, freq=frequency)
    check(first <= max(steps[1], last), "start", start, allowed)
    steps = pandas.date_range(known[-1], max(first, steps[1]), freq=frequency)[1:]
    missing = steps[steps < first].as_unit(history.index.unit)
    history = history.reindex(history.index.append(missing)) if len(missing) else history
    return history.iloc[-config.lookback :].rename_axis(index=frame.index.name)


def histories(series: Series, config: ForecastConfig, start: str | None) -> Any:
    """As `model.predict` takes them: the frame of a wide file, or that of all series of a long one."""
    frame = series.frame()
    if not series.sections:
        return history_of(frame, config, start)
    parts = []
    for section in series.sections:
        own = frame.iloc[section.begin : section.end].drop(columns=series.id_column)
        own = history_of(own, config, start, f" in {section.name}")
        own.insert(0, series.id_column, section.name)
        parts.append(own)
    return require("pandas", "forecast").concat(parts).reset_index()


def known_ahead(command: Predict, series: Series, reading: Reading) -> Any:
    """The frame of known covariates for `model.predict`; None for a model without any."""
    if not reading.known:
        check(command.future is None, "future", command.future, "none: this model has no known covariates")
        return None
    if command.future is not None:
        return read_future(command.future, replace(reading, id_column=series.id_column))
    told = f"a file with {', '.join(reading.known)} of the dates to forecast, or --start within the data"
    check(command.start is not None, "future", None, told)
    frame = series.frame()
    return frame[~frame.index.duplicated()] if not series.sections else frame.reset_index()


def outlooks(series: Series, history: Any, forecast: Any, levels: Sequence[float]) -> list[Outlook]:
    """Of what `histories` gave and what `model.predict` made of it."""
    frame = series.frame()
    if series.sections:
        key, dates, target = series.id_column, series.date_column, series.columns[0]
        past, known = (
            {str(name): own for name, own in each.groupby(key, sort=False)}
            for each in (history.set_index(dates), frame)
        )
        made = ((str(name), own.drop(columns=key)) for name, own in forecast.set_index(dates).groupby(key, sort=False))
        return [Outlook(n, past[n][target], known[n][target].reindex(own.index), own) for n, own in made]
    truth = frame[~frame.index.duplicated()].reindex(forecast.index)
    return [Outlook(n, history[n], truth[n], forecast[column_names(n, levels)]) for n in series.columns]


def as_csv(forecast: Any, date_column: str | None) -> str:
    """A spreadsheet would run the name of a column, or of a series, that begins like a formula. date_column: of the
    index; None where dates are a column and the first one has the names of series."""
    shown = forecast.rename(columns=lambda name: in_csv(str(name)))
    if date_column is not None:
        return shown.to_csv(index_label=in_csv(date_column), lineterminator="\n")
    shown[shown.columns[0]] = [in_csv(str(name)) for name in shown[shown.columns[0]]]
    return shown.to_csv(index=False, lineterminator="\n")


def predict(args: Sequence[str]) -> int:
    command = parse(Predict, model_named(args), "forecast predict", Predict())
    check_no_run(command.out)
    model = load(command.model)
    config = model.config
    reading = as_trained(command.reading, config)
    told(command.data, ABOUT_PACKAGED)
    try:
        series = read(command.data, reading)
    except ValueError as error:
        told_by = "" if reading == command.reading else f" (read as {command.model} was trained)"
        raise ValueError(f"{error}{told_by}") from error
    allowed = (
        f"a file with one row per date: the model was not trained on several series, told apart by {series.id_column}"
    )
    check(not series.sections or config.id_column is not None, "data", command.data, allowed)
    if series.sections:
        config.id_column, config.date_column = series.id_column, series.date_column
    config.missing_below = series.missing_below
    history = histories(series, config, command.start)
    forecast = model.predict(history, known_ahead(command, series, reading), command.levels, command.intervals)
    dates = forecast[series.date_column] if series.sections else forecast.index
    title = f"{series.name}: {config.horizon} rows from {min(dates)}"
    found = outlooks(series, history, forecast, command.levels)
    figure = forecast_figure(found, title, DRAWN * config.horizon)
    with atomic.replacing_files(command.out) as new:
        save(figure, new / FIGURE)
        atomic.write(new / FORECAST, as_csv(forecast, None if series.sections else series.date_column))
    errors = {own.name: (own.forecast.iloc[:, 0] - own.truth).abs().dropna() for own in found}
    if known := {name: each for name, each in errors.items() if len(each)}:
        shown = ", ".join(f"{name} {each.mean():.4g}" for name, each in known.items())
        if series.sections:
            shown = f"{np.concatenate([*known.values()]).mean():.4g} over {len(known)} series"
        print(f"Mean absolute error where the truth is known: {shown}")
    if command.levels:
        print(f"Intervals: {chosen_kind(config, command.levels, command.intervals)}")
    print(f"{len(forecast)} rows from {min(dates)} to {max(dates)} are in {command.out / FORECAST}")
    return 0


FRAME = "cv.csv"


@dataclass(frozen=True)
class CV(Train):
    """Cross-validate a forecaster: forecasts from several cutoffs, each scored on the rows that came after.

    The results folder gets cv.csv, with unique_id, ds, cutoff, y and the forecasts, and table.md, the errors of every
    window beside those of simple forecasts.
    """

    n_windows: Count = 3
    """Windows, the last of which ends with the last row."""
    step_size: Count | None = None
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


def cv(args: Sequence[str]) -> int:
    command = parse(CV, args, "forecast cv", CV())
    command.run.apply()
    step = command.horizon if command.step_size is None else command.step_size
    check_options(command)
    held = Held(command.n_windows, step)
    spec, series = prepared(command, held)
    asked: dict[str, Any] = {"refit": command.refit, "levels": command.levels, "intervals": command.intervals}
    whole = CVSpec(**{**vars(spec), **asked}, n_windows=held.windows, step_size=step)
    parts = [(until(series, (held.windows - 1 - i) * step), Held(1, step)) for i in range(held.windows)]
    parts = parts if command.refit else [(series, held)]
    for part, windows in parts:
        check_possible(spec, part, windows)
    if command.levels:  # before any training; few windows may allow fewer levels
        possible = ForecastConfig(quantiles=[*command.quantiles] or None, conformal_levels=[*LEVELS])
        chosen_kind(possible, command.levels, command.intervals)
    results = Results("forecast cv", whole, command.run, [FRAME, *(f"window-{i + 1}" for i in range(held.windows))])
    if results.finished:
        return show_table(results)
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
    return show_table(results)


def until(series: Series, dropped: int) -> Series:
    """Without so many last rows, of each series."""
    if not dropped:
        return series
    at, sections, kept = 0, [], [np.arange(0 if series.sections else len(series.values) - dropped)]
    for section in series.sections:
        left = section.rows - dropped
        if left > 0:
            sections.append(section._replace(begin=at, end=at + left))
            kept.append(np.arange(section.begin, section.begin + left))
            at += left
    rows = np.concatenate(kept)
    made = replace(series, dates=series.dates[rows], values=series.values[rows], sections=tuple(sections))
    return made if series.covariates is None else replace(made, covariates=series.covariates[rows])


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
    found, names = [], column_names(spec.model, command.levels)
    for number in range(held.windows):
        ahead = spec.horizon + (held.windows - 1 - number) * held.step
        history, future = before(series, spec, held, ahead)
        forecast = made.model.predict(history, future, command.levels, command.intervals)
        for own in outlooks(series, history, forecast, command.levels):
            rows = own.forecast.set_axis(names, axis=1).assign(y=own.truth, cutoff=own.history.index[-1])
            found.append(rows.rename_axis(index="ds").reset_index().assign(unique_id=own.name))
    frame = require("pandas", "forecast").concat(found, ignore_index=True)
    return frame[["unique_id", "ds", "cutoff", "y", *names]]


def before(series: Series, spec: Spec, held: Held, ahead: int) -> tuple[Any, Any]:
    """For `model.predict`: the rows that end `ahead` before the end, of each series that is long enough, and the known
    covariates of those that follow."""
    frame = series.frame()
    if series.sections:
        sections = [section for section in series.sections if section.rows > held.rows(spec.horizon)]
        kept = [frame.iloc[s.begin : s.end - ahead].iloc[-spec.lookback :] for s in sections]
        history, whole = require("pandas", "forecast").concat(kept).reset_index(), frame.reset_index()
    else:
        whole = frame[~frame.index.duplicated()]
        history = whole.iloc[: len(whole) - ahead].iloc[-spec.lookback :]
    return history, whole if series.known else None


def finish(results: Results, spec: CVSpec, scored: Sequence[Scored]) -> None:
    frame = require("pandas", "forecast").concat([each.frame for each in scored], ignore_index=True)
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
