"""`femixer forecast predict`: what a trained model expects next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from femixer.models.forecast import ForecastConfig, Forecaster
from femixer.models.forecast.frames import is_date_name
from femixer.models.quiet import without_bars
from femixer.optional import require
from femixer.options import check, parse
from femixer.reporting.escape import in_csv
from femixer.reporting.figures import save
from femixer.tasks.forecast.data import ABOUT_PACKAGED, PACKAGED, Reading, read
from femixer.tasks.forecast.fit import forecast_figure
from femixer.tasks.runner import told
from femixer.training import atomic
from femixer.training.results import MODEL

FORECAST, FIGURE = "forecast.csv", "figure.png"
DRAWN = 3
"""Horizons of history in the figure."""


@dataclass(frozen=True)
class Command:
    """Forecast the rows that follow a series, with a model of `femixer forecast train`.

    Writes forecast.csv, with the dates and columns of the data, and figure.png: the history, the forecast, and what
    came, where the data have it.
    """

    model: Path = Path("results/forecast")
    """Results folder of `femixer forecast train`, or a model's own folder."""
    data: str = PACKAGED
    """A CSV or parquet file with the columns that the model was trained on, or folder/NAME of one."""
    start: str | None = None
    """First date to forecast, from the rows before it; by default the one after the last row."""
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
    check(
        not reading.columns,
        "columns",
        reading.columns,
        f"none: the model has its own, {', '.join(config.columns or ())}",
    )
    return replace(
        reading,
        date_column=reading.date_column or date,
        date_format=reading.date_format or config.date_format,
        missing_below=config.missing_below if reading.missing_below is None else reading.missing_below,
        columns=tuple(config.columns or ()),
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


def forecast_from(model: Forecaster, frame: Any, start: str | None) -> tuple[Any, Any]:
    """The rows that the forecast is made of, and the forecast; rows missing before its start have no values."""
    first = None if start is None else as_date(start, frame.index)
    allowed = f"a date after {frame.index[0]}, and at most the one that follows {frame.index[-1]}"
    check(first is None or first > frame.index[0], "start", start, allowed)
    history = (frame if first is None else frame[frame.index < first]).iloc[-model.config.lookback :]
    forecast = model.predict(history)
    if first is None:
        return history, forecast
    check(first <= max(forecast.index[0], frame.index[-1]), "start", start, allowed)
    while forecast.index[0] < first:
        missing = forecast[forecast.index < first] * float("nan")
        history = require("pandas", "series").concat([history, missing]).iloc[-model.config.lookback :]
        forecast = model.predict(history)
    return history, forecast


def as_csv(forecast: Any, date_column: str) -> str:
    """A spreadsheet would run the name of a column that begins like a formula."""
    shown = forecast.rename(columns=lambda name: in_csv(str(name)))
    return shown.to_csv(index_label=in_csv(date_column), lineterminator="\n")


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "forecast predict", Command())
    model = load(command.model)
    reading = as_trained(command.reading, model.config)
    told(command.data, ABOUT_PACKAGED)
    series = read(command.data, reading)
    model.config.missing_below = series.missing_below
    frame = series.frame()
    frame = frame[~frame.index.duplicated()]
    history, forecast = forecast_from(model, frame, command.start)
    truth = frame.reindex(forecast.index)
    command.out.mkdir(parents=True, exist_ok=True)
    atomic.write(command.out / FORECAST, as_csv(forecast, series.date_column))
    drawn = history.iloc[-DRAWN * model.config.horizon :]
    figure = forecast_figure(drawn, truth, forecast, f"{series.name}: {len(forecast)} rows from {forecast.index[0]}")
    save(figure, command.out / FIGURE)
    errors = (forecast - truth).abs().mean().dropna()
    if len(errors):
        shown = ", ".join(f"{name} {error:.4g}" for name, error in errors.items())
        print(f"Mean absolute error where the truth is known: {shown}")
    print(f"{len(forecast)} rows from {forecast.index[0]} to {forecast.index[-1]} are in {command.out / FORECAST}")
    return 0
