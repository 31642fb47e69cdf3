"""`femixer forecast predict`: what a trained model expects next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from femixer.models.files import without_bars
from femixer.models.forecast import ForecastConfig, Forecaster
from femixer.models.forecast.frames import is_date_name, regular
from femixer.models.forecast.window import Kind, chosen_kind, column_names
from femixer.optional import require
from femixer.options import check, model_named, parse
from femixer.reporting.figures import save
from femixer.reporting.writers import in_csv
from femixer.tasks.forecast.data import ABOUT_PACKAGED, PACKAGED, Reading, Series, read, read_future
from femixer.tasks.forecast.fit import PANELS, Panel, forecast_figure
from femixer.tasks.runner import told
from femixer.training import atomic
from femixer.training.results import MODEL, check_no_run

FORECAST, FIGURE = "forecast.csv", "figure.png"
DRAWN = 3
"""Horizons of history in the figure."""


@dataclass(frozen=True)
class Command:
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
    """A file with the known covariates of the dates to forecast, where the model has any; with --start, by default the
    data."""
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
    pandas = require("pandas", "series")
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
    pandas = require("pandas", "series")
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
    return require("pandas", "series").concat(parts).reset_index()


def known_ahead(command: Command, series: Series, reading: Reading) -> Any:
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


def panels(series: Series, history: Any, forecast: Any, levels: Sequence[float], drawn: int) -> list[Panel]:
    """Of the first channels, or series of a long file: all over dates."""
    frame, widest = series.frame(), sorted(levels, reverse=True)
    made = []
    if series.sections:
        name = [*forecast.columns][2]
        keys, target, dates = [s.name for s in series.sections], series.columns[0], series.date_column
        parts = [(x[x[series.id_column] == key].set_index(dates), key) for key in keys[:PANELS] for x in (forecast,)]
        for part, key in parts:
            past = history[history[series.id_column] == key].set_index(dates)[target].iloc[-drawn:]
            truth = frame[frame[series.id_column] == key][target].reindex(part.index)
            ends = [tuple(part[end] for end in column_names(name, [level])[1:]) for level in widest]
            made.append(Panel(str(key), past, truth, part[name], ends))
        return made
    frame = frame[~frame.index.duplicated()]
    for column in series.columns[:PANELS]:
        ends = [tuple(forecast[end] for end in column_names(column, [level])[1:]) for level in widest]
        truth = frame[column].reindex(forecast.index)
        made.append(Panel(column, history[column].iloc[-drawn:], truth, forecast[column], ends))
    return made


def told_errors(series: Series, forecast: Any) -> str | None:
    """Mean absolute errors where the truth is known."""
    frame = series.frame()
    if series.sections:
        keys = [series.id_column, series.date_column]
        truth = frame.reset_index().set_index(keys)[series.columns[0]]
        found = forecast.set_index(keys).iloc[:, 0]
        errors = (found - truth.reindex(found.index)).abs().dropna()
        return f"{errors.mean():.4g} over {errors.index.droplevel(1).nunique()} series" if len(errors) else None
    truth = frame[~frame.index.duplicated()][[*series.columns]].reindex(forecast.index)
    errors = (forecast[[*series.columns]] - truth).abs().mean().dropna()
    return ", ".join(f"{name} {error:.4g}" for name, error in errors.items()) if len(errors) else None


def as_csv(forecast: Any, date_column: str | None) -> str:
    """A spreadsheet would run the name of a column, or of a series, that begins like a formula. date_column: of the
    index; None where dates are a column and the first one has the names of series."""
    shown = forecast.rename(columns=lambda name: in_csv(str(name)))
    if date_column is not None:
        return shown.to_csv(index_label=in_csv(date_column), lineterminator="\n")
    shown[shown.columns[0]] = [in_csv(str(name)) for name in shown[shown.columns[0]]]
    return shown.to_csv(index=False, lineterminator="\n")


def main(args: Sequence[str]) -> int:
    command = parse(Command, model_named(args), "forecast predict", Command())
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
    drawn = panels(series, history, forecast, command.levels, DRAWN * config.horizon)
    figure = forecast_figure(drawn, title, max(len(series.sections), len(series.columns)) - len(drawn))
    with atomic.replacing_files(command.out) as new:
        save(figure, new / FIGURE)
        atomic.write(new / FORECAST, as_csv(forecast, None if series.sections else series.date_column))
    errors = told_errors(series, forecast)
    if errors is not None:
        print(f"Mean absolute error where the truth is known: {errors}")
    if command.levels:
        print(f"Intervals: {chosen_kind(config, command.levels, command.intervals)}")
    print(f"{len(forecast)} rows from {min(dates)} to {max(dates)} are in {command.out / FORECAST}")
    return 0
