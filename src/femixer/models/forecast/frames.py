"""Forecasts of pandas frames: the time stamps and columns of the history, and those of what follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from femixer.models.forecast.config import ForecastConfig
from femixer.optional import require

DATE_NAMES = ("date", "datetime", "timestamp", "time", "ds")
"""Of a column of time stamps, whatever its capitals, spaces and underscores."""
STRETCHES = (20, 10, 5)
"""Lengths of stretches of dates that are looked at for a frequency where all of them together have gaps."""
SPARSE = 10
"""Steps per date, on average, from which on a frequency is not that of the dates."""


def is_frame(history: Any) -> bool:
    """Whether it is pandas', without importing pandas for those who have none."""
    return type(history).__module__.partition(".")[0] == "pandas"


def predicted(history: Any, config: ForecastConfig, predict: Callable[[np.ndarray], np.ndarray]) -> Any:
    """A DataFrame or Series of the next `horizon` points, with their time stamps where the history has its own.

    predict: array [L, C] -> array [horizon, C].
    """
    pandas = require("pandas", "series")
    if isinstance(history, pandas.Series):
        if config.channels != 1:
            raise ValueError(f"history is a Series, which is 1 channel; this model was made for {config.channels}")
        name = 0 if history.name is None else history.name
        column = predicted(history.to_frame(name), _unnamed(config), predict)[name]
        return column.rename(history.name)
    if not isinstance(history, pandas.DataFrame):
        raise TypeError(f"history is a pandas {type(history).__name__}; allowed are DataFrame and Series")
    date = date_column(history, config)
    stamps = pandas.DatetimeIndex(history.index if date is None else parsed(history[date], config.date_format))
    values = value_columns(history.drop(columns=[] if date is None else [date]), config)
    frequency, known = regular(stamps, config.frequency)
    rows = values.set_axis(stamps).reindex(known)
    following = pandas.date_range(known[-1], periods=config.horizon + 1, freq=frequency)[1:].as_unit(stamps.unit)
    forecast = pandas.DataFrame(predict(rows.to_numpy(dtype=float)), index=following, columns=values.columns)
    if date is None:
        return forecast.rename_axis(index=history.index.name)
    return forecast.rename_axis(index=date).reset_index()


def _unnamed(config: ForecastConfig) -> ForecastConfig:
    """For a Series, whose name need not be that of the one channel."""
    return ForecastConfig.from_dict({**config.to_dict(), "columns": None})


def date_column(frame: Any, config: ForecastConfig) -> Any:
    """The name of the column with the time stamps; None where the index has them."""
    pandas = require("pandas", "series")
    if isinstance(frame.index, pandas.DatetimeIndex):
        return None
    if config.date_column is not None and config.date_column in frame.columns:
        return config.date_column
    is_date = pandas.api.types.is_datetime64_any_dtype
    found = [name for name in frame.columns if is_date(frame[name].dtype)]
    found = found or [name for name in frame.columns if is_date_name(str(name))]
    if len(found) != 1:
        raise ValueError(
            f"history has {len(found)} date columns among {', '.join(map(str, frame.columns))}; allowed is one, named "
            f"{', '.join(DATE_NAMES)}, or a DatetimeIndex"
        )
    return found[0]


def is_date_name(name: str) -> bool:
    return "".join(name.split()).replace("_", "").lower() in DATE_NAMES


def parsed(column: Any, form: str | None) -> Any:
    """A column of time stamps, or of text that says them, in the format that the model was trained with."""
    try:
        return column if column.dtype.kind == "M" else read_dates(column, form, "raise")
    except (ValueError, TypeError) as error:
        raise ValueError(f"history has dates in column {column.name!r} that cannot be read: {error}") from None


def read_dates(texts: Any, form: str | None, errors: str) -> Any:
    """Texts as time stamps, in UTC where their offsets differ, as those of summer and winter do. errors: of pandas."""
    pandas = require("pandas", "series")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they have no single format
        try:
            found = pandas.to_datetime(texts, format=form, errors=errors)
        except ValueError:
            return pandas.to_datetime(texts, format=form, errors=errors, utc=True)
        return found if found.dtype.kind == "M" else pandas.to_datetime(texts, format=form, errors=errors, utc=True)


def value_columns(frame: Any, config: ForecastConfig) -> Any:
    """The model's channels, by name if it knows their names."""
    if config.columns is not None:
        missing = [name for name in config.columns if name not in frame.columns]
        if missing:
            raise ValueError(
                f"history has no column {', '.join(map(repr, missing))}; this model was made for "
                f"{', '.join(config.columns)}"
            )
        frame = frame[config.columns]
    if frame.shape[1] != config.channels:
        raise ValueError(
            f"history has {frame.shape[1]} columns besides the dates ({', '.join(map(str, frame.columns))}); this "
            f"model was made for {config.channels}"
        )
    for name in frame.columns:
        if frame[name].dtype.kind not in "fiub":
            raise TypeError(f"history has dtype {frame[name].dtype} in column {name!r}; allowed are numbers")
    return frame


def regular(stamps: Any, given: str | None) -> tuple[Any, Any]:
    """The frequency of time stamps, and all time stamps of that frequency from the first to the last.

    Inferred; or the one given, or the commonest step, if rows are missing.
    """
    pandas = require("pandas", "series")
    if len(stamps) == 0 or stamps.hasnans or not (stamps.is_monotonic_increasing and stamps.is_unique):
        raise ValueError("history has missing, repeated or unordered dates (or none); allowed is an ascending sequence")
    frequency = stamps.freq or inferred(stamps) or given or usual(stamps)
    if given == "B" and is_working_week(stamps):  # some days of one week look like any days
        frequency = given
    if frequency is None and len(stamps) > 1:
        frequency = pandas.Series(stamps[1:] - stamps[:-1]).mode()[0]
    if frequency is None:
        raise ValueError("history has one row and the model knows no frequency; allowed are at least two rows")
    every = pandas.date_range(stamps[0], stamps[-1], freq=frequency)
    if not stamps.isin(every).all():
        strange = stamps[~stamps.isin(every)][0]
        raise ValueError(f"history has irregular dates: {strange} does not fit steps of {frequency}")
    return frequency, every


def inferred(stamps: Any) -> Any:
    """The frequency of time stamps without gaps; None where there is none, or fewer than 3 stamps."""
    pandas = require("pandas", "series")
    if len(stamps) < 3:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a later pandas will return an offset and not a text: both will do
        return pandas.infer_freq(stamps)


def usual(stamps: Any) -> Any:
    """The frequency that stretches without gaps have and that all time stamps fit; None where there is none."""
    pandas = require("pandas", "series")
    for length in STRETCHES:
        pieces = [stamps[max(0, end - length) : end] for end in range(len(stamps), 2, -length)]
        found = pandas.Series([inferred(piece) for piece in pieces], dtype=object).dropna()
        for frequency in found.value_counts().index:
            if (
                _steps(stamps, frequency) < SPARSE * len(stamps)
                and stamps.isin(pandas.date_range(stamps[0], stamps[-1], freq=frequency)).all()
            ):
                return frequency
    return None


def _steps(stamps: Any, frequency: str) -> float:
    """From the first to the last; 0 where a step has no one length, which is long then."""
    offset = require("pandas.tseries.frequencies", "series").to_offset(frequency)
    try:
        return (stamps[-1] - stamps[0]).total_seconds() * 1e9 / offset.nanos
    except ValueError:
        return 0.0


def is_working_week(stamps: Any) -> bool:
    """Whether these are one a day, and none of them is on a weekend."""
    return bool(stamps.normalize().is_unique and (stamps.day_of_week < 5).all())
