"""Dates: texts that must be dates, and each later than the one before."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from femixer.models.forecast.frames import inferred, is_working_week, read_dates, usual
from femixer.optional import require
from femixer.tasks.forecast.rows import Rows


def as_dates(rows: Rows, column: str, form: str | None, repeated: bool = False) -> Any:
    """The column as a pandas.DatetimeIndex, which never goes back; `repeated`: nor need it go on."""
    pandas = require("pandas", "series")
    cells = rows.frame[column]
    dates = pandas.DatetimeIndex(cells if cells.dtype.kind == "M" else parsed(rows, column, form))
    bad = np.flatnonzero(dates.isna())
    if len(bad):
        cell = cells.iloc[bad[0]]
        told = f"is {cell!r}, which is not a date like those before" if pandas.notna(cell) else "is missing"
        rows.refuse(bad[0], f"{column} {told}; --date-format says how dates are written")
    late = np.flatnonzero(dates[1:] < dates[:-1] if repeated else dates[1:] <= dates[:-1])
    if len(late):
        row = late[0] + 1
        told = "repeats that of" if dates[row] == dates[row - 1] else f"is before {dates[row - 1]} of"
        rows.refuse(row, f"{column} {dates[row]} {told} {rows.place(row - 1)}; dates must increase")
    return dates


def parsed(rows: Rows, column: str, form: str | None) -> Any:
    """NaT where a cell is no date. A number such as 2016 is a year, and not nanoseconds."""
    texts = rows.frame[column]
    texts = texts.where(texts.isna(), texts.astype(str))
    if form is None:
        refuse_two_readings(rows, column, texts)
    try:
        return read_dates(texts, form, "coerce")
    except ValueError as error:
        raise ValueError(f"{rows.path}, column {column}: {error}") from error


def refuse_two_readings(rows: Rows, column: str, texts: Any) -> None:
    """Dates such as 01/02/2016, of which no row tells whether the day or the month comes first."""
    numbers = texts.astype(str).str.extract(r"^\s*(\d{1,2})([/.-])(\d{1,2})[/.-](\d{4}|\d{2})\b(.*)$")
    if not len(numbers) or numbers.isna().any(axis=None):
        return
    first, second = (numbers[place].astype(int) for place in (0, 2))
    if max(first.max(), second.max()) <= 12 and (first != second).any():
        row = int((first != second).to_numpy().argmax())
        mark, year, rest = (numbers[place].iloc[row] for place in (1, 3, 4))
        ending = mark + ("%Y" if len(year) == 4 else "%y") + as_format(rest)
        forms = " or ".join(repr(mark.join(parts) + ending) for parts in (("%d", "%m"), ("%m", "%d")))
        rows.refuse(row, f"{column} is {texts.iloc[row]!r}, and no row tells day from month; say --date-format {forms}")


def as_format(time: str) -> str:
    """What follows a date, such as " 12:00", as a format."""
    return re.sub(r"\d{1,2}(:\d\d)(:\d\d)?", lambda found: "%H:%M" + (":%S" if found[2] else ""), time, count=1)


def season_of(dates: Any, working_days: bool = False) -> int:
    """Rows of a day; of a week if rows are days, of a year if they are weeks or longer, by the usual distance of two.

    A week has 5 rows if these are `working_days`, or if none is on a weekend. 1 where there are not at least 2 of them.
    """
    if len(dates) < 2:
        return 1
    step = float(np.median(np.diff(dates.as_unit("s").asi8)))
    day = 86400.0
    for season, shortest, longest in ((day, 0, day / 2), (7 * day, day, day), (365.25 * day, 7 * day, 100 * day)):
        if shortest <= step <= longest:
            working = season == 7 * day and (working_days or (len(dates) > 5 and is_working_week(dates)))
            return 5 if working else round(season / step)
    return 1


def frequency_of(dates: Any) -> str | None:
    """In pandas' words, as "h" or "15min": of all dates, or of stretches without gaps; None if none fits all."""
    found = inferred(dates) or usual(dates)
    return None if found is None else str(getattr(found, "freqstr", found))
