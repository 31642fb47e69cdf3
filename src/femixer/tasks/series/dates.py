"""Dates: texts that must be dates, and each later than the one before."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from femixer.models.forecast.frames import inferred
from femixer.optional import require
from femixer.tasks.series.rows import Rows

LATEST = 20
"""Dates that tell the frequency where earlier ones have gaps."""


def as_dates(rows: Rows, column: str, form: str | None) -> Any:
    """The column as a pandas.DatetimeIndex."""
    pandas = require("pandas", "series")
    cells = rows.frame[column]
    dates = pandas.DatetimeIndex(cells if cells.dtype.kind == "M" else parsed(rows, column, form))
    bad = np.flatnonzero(dates.isna())
    if len(bad):
        cell = cells.iloc[bad[0]]
        told = f"is {cell!r}, which is not a date like those before" if pandas.notna(cell) else "is missing"
        rows.refuse(bad[0], f"{column} {told}; --date-format says how dates are written")
    late = np.flatnonzero(dates[1:] <= dates[:-1])
    if len(late):
        row = late[0] + 1
        told = "repeats that of" if dates[row] == dates[row - 1] else f"is before {dates[row - 1]} of"
        rows.refuse(row, f"{column} {dates[row]} {told} {rows.place(row - 1)}; dates must increase")
    return dates


def parsed(rows: Rows, column: str, form: str | None) -> Any:
    """NaT where a cell is no date. A number such as 2016 is a year, and not nanoseconds."""
    pandas = require("pandas", "series")
    texts = rows.frame[column]
    texts = texts.where(texts.isna(), texts.astype(str))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no format fits the first one: we say that of a row
        try:
            return pandas.to_datetime(texts, format=form, errors="coerce")
        except ValueError as error:
            raise ValueError(f"{rows.path}, column {column}: {error}") from error


def season_of(dates: Any) -> int:
    """Rows of a day; of a week if rows are days, of a year if they are weeks or longer, by the usual distance of two.

    1 where there are not at least 2 of them.
    """
    if len(dates) < 2:
        return 1
    step = float(np.median(np.diff(dates.as_unit("s").asi8)))
    day = 86400.0
    for season, shortest, longest in ((day, 0, day / 2), (7 * day, day, day), (365.25 * day, 7 * day, 100 * day)):
        if shortest <= step <= longest:
            return round(season / step)
    return 1


def frequency_of(dates: Any) -> str | None:
    """In pandas' words, as "h" or "15min": of all dates, or of the latest where those have gaps; None if these have."""
    found = inferred(dates) or inferred(dates[-LATEST:])
    return None if found is None else str(getattr(found, "freqstr", found))
