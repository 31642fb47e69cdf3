"""Forecasts of pandas frames: the time stamps and columns of the history, and those of what follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from femixer.models.forecast.window import Prediction, Window, column_names, columns_of
from femixer.optional import require
from femixer.options import check

if TYPE_CHECKING:
    from femixer.models.forecast.forecaster import ForecastConfig

DATE_NAMES = ("date", "datetime", "timestamp", "time", "ds")
"""Of a column of time stamps, whatever its capitals, spaces and underscores."""
STRETCHES = (20, 10, 5)
"""Lengths of stretches of dates that are looked at for a frequency where all of them together have gaps."""
SPARSE = 10
"""Steps per date, on average, from which on a frequency is not that of the dates."""


def is_frame(history: Any) -> bool:
    """Whether it is pandas', without importing pandas for those who have none."""
    return type(history).__module__.partition(".")[0] == "pandas"


def predicted(
    history: Any,
    config: ForecastConfig,
    predict: Callable[[Sequence[Window]], list[Prediction]],
    future: Any = None,
    levels: Sequence[float] = (),
) -> Any:
    """A DataFrame or Series of the next `horizon` points, with their time stamps where the history has its own."""
    pandas = require("pandas", "forecast")
    if isinstance(history, pandas.Series):
        if config.channels != 1:
            raise ValueError(f"history is a Series, which is 1 channel; this model was made for {config.channels}")
        name = 0 if history.name is None else history.name
        unnamed = type(config).from_dict({**config.to_dict(), "columns": None})  # its name need not be the channel's
        found = predicted(history.to_frame(name), unnamed, predict, future, levels)
        return found if levels else found[name].rename(history.name)
    if not isinstance(history, pandas.DataFrame):
        raise TypeError(f"history is a pandas {type(history).__name__}; allowed are DataFrame and Series")
    check_future(future, config)
    if config.id_column is not None and config.id_column in history.columns:  # many series below each other
        windows = long_windows(history, config, future)
        return long_frame(windows, predict(windows), config, levels)
    date = date_column(history, config)
    window, columns, index = window_of(history, date, config, future)
    (found,) = predict([window])
    names = [own for name in columns for own in (column_names(name, levels) if levels else [name])]
    values = np.concatenate([columns_of(found, channel) for channel in range(len(columns))], 1)
    forecast = pandas.DataFrame(values, index=window.following, columns=names)
    if date is None:
        return forecast.rename_axis(index=index)
    return forecast.rename_axis(index=date).reset_index()


def window_of(
    frame: Any, date: Any, config: ForecastConfig, future: Any, name: str | None = None
) -> tuple[Window, list[Any], Any]:
    """The window of a frame of one series, the columns that are forecast, and the name of its index.

    date: its column of time stamps, None where the index has them. name: of one of many series.
    """
    pandas = require("pandas", "forecast")
    stamps = pandas.DatetimeIndex(frame.index if date is None else parsed(frame[date], config.date_format))
    others = frame.drop(columns=[] if date is None else [date])
    covariates = numbers_of(others, config.covariates, "covariate") if config.covariates else None
    values = value_columns(others.drop(columns=config.covariates), config)
    frequency, known = regular(stamps, config.frequency, "" if name is None else f" in {name}")
    following = pandas.date_range(known[-1], periods=config.horizon + 1, freq=frequency)[1:].as_unit(stamps.unit)
    window = Window(
        values.set_axis(stamps).reindex(known).to_numpy(dtype=float),
        None if covariates is None else covariates.set_axis(stamps).reindex(known).to_numpy(dtype=float),
        future_values(future, following, config, name),
        name,
        following,
    )
    return window, [*values.columns], frame.index.name


def numbers_of(frame: Any, names: Sequence[str], what: str) -> Any:
    """The columns of these names, which must be there and hold numbers."""
    for name in names:
        if name not in frame.columns:
            raise ValueError(f"history has no column {name!r}, a {what} of this model")
        if frame[name].dtype.kind not in "fiub":
            raise TypeError(f"history has dtype {frame[name].dtype} in column {name!r}; allowed are numbers")
    return frame[[*names]]


def check_future(future: Any, config: ForecastConfig) -> None:
    """A frame with the known covariates, where the model has some; None otherwise."""
    names = config.known_covariates or []
    if future is None:
        told = f"a frame with {', '.join(names)} at the {config.horizon} time stamps to forecast: known ahead"
        check(not names, "future", None, told)
        return
    check(bool(names), "future", type(future).__name__, "None: this model has no known covariates")
    check(is_frame(future) and hasattr(future, "columns"), "future", type(future).__name__, "a pandas DataFrame")
    for name in names:
        if name not in future.columns:
            raise ValueError(f"future has no column {name!r}, a known covariate of this model")


def future_values(future: Any, following: Any, config: ForecastConfig, name: str | None) -> np.ndarray | None:
    """[horizon, K] of a frame of one series; an error that says what is missing."""
    if future is None:
        return None
    pandas = require("pandas", "forecast")
    date = date_column(future, config)
    stamps = pandas.DatetimeIndex(future.index if date is None else parsed(future[date], config.date_format))
    of = "" if name is None else f" of {name}"
    if stamps.has_duplicates:
        raise ValueError(f"future{of} has {stamps[stamps.duplicated()][0]} twice")
    rows = future[config.known_covariates].set_axis(stamps).reindex(following)
    missing = rows.isna()
    if missing.any(axis=None):
        column = missing.columns[missing.any()][0]
        dates = following[missing[column]]
        raise ValueError(
            f"future{of} has no value of {column} for {dates[0]} ({len(dates)} of {len(following)} dates to forecast, "
            f"{following[0]} to {following[-1]})"
        )
    return rows.to_numpy(dtype=float)


def long_windows(frame: Any, config: ForecastConfig, future: Any) -> list[Window]:
    """One per series, in the order of their first rows; rows of a series may stand in any order."""
    pandas, column = require("pandas", "forecast"), config.id_column
    for given, what in ((frame, "history"), (future, "future")):
        if given is not None and (column not in given.columns or given[column].isna().any()):
            raise ValueError(f"{what} must say the series of every row in column {column!r}")
    if not len(frame):
        raise ValueError("history has no rows")
    date = date_column(frame.drop(columns=column), config)
    ahead = {} if future is None else {str(name): own for name, own in future.groupby(column, sort=False)}
    windows = []
    for key, own in frame.groupby(column, sort=False):
        name = str(key)
        if future is not None and name not in ahead:
            raise ValueError(f"future has no rows of {name}, a series of the history")
        rows = own.drop(columns=column)
        stamps = rows.index if date is None else parsed(rows[date], config.date_format)
        rows = rows.iloc[pandas.DatetimeIndex(stamps).argsort()]
        coming = None if future is None else ahead[name].drop(columns=column)
        windows.append(window_of(rows, date, config, coming, name)[0])
    return windows


def long_frame(
    windows: Sequence[Window], found: Sequence[Prediction], config: ForecastConfig, levels: Sequence[float]
) -> Any:
    """unique_id, ds, MODEL, MODEL-lo-80, MODEL-hi-80, ... of forecasts of one channel each."""
    pandas = require("pandas", "forecast")
    names = column_names(config.label or config.kind, levels)
    parts = []
    for window, each in zip(windows, found, strict=True):
        part = pandas.DataFrame(columns_of(each, 0), columns=names)
        part.insert(0, config.date_column or "ds", window.following)
        part.insert(0, config.id_column or "unique_id", window.name)
        parts.append(part)
    return pandas.concat(parts, ignore_index=True)


def date_column(frame: Any, config: ForecastConfig) -> Any:
    """The name of the column with the time stamps; None where the index has them."""
    pandas = require("pandas", "forecast")
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
    pandas = require("pandas", "forecast")
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
    return numbers_of(frame, frame.columns, "column")


def regular(stamps: Any, given: str | None, where: str = "") -> tuple[Any, Any]:
    """The frequency of time stamps, and all time stamps of that frequency from the first to the last.

    Inferred; or the one given, or the commonest step, if rows are missing.
    """
    pandas = require("pandas", "forecast")
    if len(stamps) == 0 or stamps.hasnans or not (stamps.is_monotonic_increasing and stamps.is_unique):
        raise ValueError(
            f"history has missing, repeated or unordered dates (or none){where}; allowed is an ascending sequence"
        )
    frequency = stamps.freq or inferred(stamps) or given or usual(stamps)
    if given == "B" and is_working_week(stamps):  # some days of one week look like any days
        frequency = given
    if frequency is None and len(stamps) > 1:
        frequency = pandas.Series(stamps[1:] - stamps[:-1]).mode()[0]
    if frequency is None:
        raise ValueError(f"history has one row{where} and the model knows no frequency; allowed are at least two rows")
    every = pandas.date_range(stamps[0], stamps[-1], freq=frequency)
    if not stamps.isin(every).all():
        strange = stamps[~stamps.isin(every)][0]
        raise ValueError(f"history has irregular dates{where}: {strange} does not fit steps of {frequency}")
    return frequency, every


def inferred(stamps: Any) -> Any:
    """The frequency of time stamps without gaps; None where there is none, or fewer than 3 stamps."""
    pandas = require("pandas", "forecast")
    if len(stamps) < 3:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a later pandas will return an offset and not a text: both will do
        return pandas.infer_freq(stamps)


def usual(stamps: Any) -> Any:
    """The frequency that stretches without gaps have and that all time stamps fit; None where there is none."""
    pandas = require("pandas", "forecast")
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
    offset = require("pandas.tseries.frequencies", "forecast").to_offset(frequency)
    try:
        return (stamps[-1] - stamps[0]).total_seconds() * 1e9 / offset.nanos
    except ValueError:
        return 0.0


def is_working_week(stamps: Any) -> bool:
    """Whether these are one a day, and none of them is on a weekend."""
    return bool(stamps.normalize().is_unique and (stamps.day_of_week < 5).all())
