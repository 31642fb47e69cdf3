"""Series: what is known of data sets by name, and reading a CSV or parquet file with a column of dates."""

import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from femixer.models.forecast.frames import DATE_NAMES, is_date_name
from femixer.optional import require
from femixer.options import check
from femixer.tasks.forecast.data.files import Rows, as_dates, read_csv

LOOKBACKS = {96: 1024, 192: 2048, 336: 2048, 720: 4096}
"""Of the protocol, by horizon."""
RATIOS = (0.7, 0.2)
"""Shares of the training and of the test rows, both rounded down; validation is what lies between."""


@dataclass(frozen=True)
class Known:
    """A data set of the literature."""

    borders: tuple[int, int, int] | None = None
    """Rows where training, validation and test end; None: by RATIOS."""
    missing_below: float | None = None
    """Values at or below mean missing."""
    also: str = ""
    """Another name under which the file is found."""
    working_days: bool = False
    """Rows are working days, whatever their dates say."""
    bare: tuple[str, str] | None = None
    """Of a file of numbers alone, without a header and dates: the first date, and the step."""


ETTH = (8640, 11520, 14400)
"""12, 4 and 4 months of 30 days, hourly; rows after them are not used."""
ETTM = (34560, 46080, 57600)
"""The same in quarters of an hour."""

KNOWN: dict[str, Known] = {
    "ETTh1": Known(ETTH),
    "ETTh2": Known(ETTH),
    "ETTm1": Known(ETTM),
    "ETTm2": Known(ETTM),
    "weather": Known(missing_below=-9000.0),
    "solar": Known(also="solar_AL", bare=("2006-01-01", "10min")),
    "electricity": Known(),
    "traffic": Known(),
    "exchange": Known(also="exchange_rate", working_days=True),
}
PACKAGED = "seattle-temps"
ABOUT_PACKAGED = "the hourly temperatures of Seattle in 2010 that come with vega_datasets"
"""A real series that vega_datasets installs: temperatures of Seattle in 2010, hourly, 8,759 points (one hour is missing
where summer time begins)."""


def known_name(stem: str) -> str:
    """The name of the data set in a file of this name without its ending: a known one as we write it, or as it is."""
    names = {name.lower(): name for name in KNOWN} | {known.also.lower(): name for name, known in KNOWN.items()}
    return names.get(stem.lower(), stem)


def default_lookback(horizon: int) -> int:
    """The protocol's; for other horizons that of the next longer one."""
    return next((length for longest, length in LOOKBACKS.items() if horizon <= longest), max(LOOKBACKS.values()))


ENDINGS = (".csv", ".parquet")


@dataclass(frozen=True)
class Reading:
    """How files are read."""

    date_column: str | None = None
    """Column of the dates, by default the one called date, datetime, timestamp, time or ds."""
    date_format: str | None = None
    """Format of the dates as in %d.%m.%Y %H:%M, where it cannot be told from the first of them."""
    columns: tuple[str, ...] = ()
    """Columns to forecast, by default all others."""
    missing_below: float | None = None
    """Values at or below mean missing, by default what is known of the data set (weather: -9000)."""


@dataclass(frozen=True)
class Series:
    """Numbers over time."""

    name: str
    dates: Any
    """pandas.DatetimeIndex [T], increasing; known data sets may repeat one."""
    values: np.ndarray
    """[T, C] in float64, NaN where missing."""
    columns: tuple[str, ...]
    date_column: str = "date"
    date_format: str | None = None
    missing_below: float | None = None
    """How the file was read."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the numbers, their dates and the names of the columns."""
        digest = hashlib.sha256(repr(self.columns).encode())
        digest.update(np.ascontiguousarray(self.values).tobytes())
        digest.update(np.ascontiguousarray(self.dates.as_unit("ns").asi8).tobytes())
        return digest.hexdigest()[:16]

    def frame(self) -> Any:
        """As a pandas.DataFrame over the dates."""
        frame = require("pandas", "series").DataFrame(self.values, index=self.dates, columns=[*self.columns])
        return frame.rename_axis(index=self.date_column)


def read(data: str, reading: Reading | None = None) -> Series:
    """The series that `data` names: a file, `folder/NAME`, or the one that comes with vega_datasets.

    Whatever is wrong with a row is a ValueError with the file, the line and what is expected.
    """
    reading = reading or Reading()
    path = locate(data)
    name = known_name(path.stem)
    known = KNOWN.get(name, Known())
    if path.suffix == ".parquet":
        rows = read_parquet(path)
    else:
        rows = without_count(read_csv(path, known.bare, reading.date_column is None), reading.date_column)
    date_column = find_date_column(rows, reading.date_column)
    dates = as_dates(rows, date_column, reading.date_format, repeated=name in KNOWN)
    columns = chosen(rows, date_column, reading.columns)
    values = np.column_stack([rows.numbers(column) for column in columns])
    limit = known.missing_below if reading.missing_below is None else reading.missing_below
    if limit is not None:
        values[values <= limit] = np.nan
    check(len(values) > 0, "data", data, "a file that has rows below its header")
    return Series(name, dates, values, tuple(columns), date_column, reading.date_format, limit)


def locate(data: str) -> Path:
    """The file that is meant."""
    path = Path(data)
    if path.is_file():
        return path
    if data == PACKAGED:
        return packaged()
    stems = [path.name, *(known.also for name, known in KNOWN.items() if name == path.name and known.also)]
    bare = [".txt"] if path.name in KNOWN and KNOWN[path.name].bare else []
    candidates = [path.with_name(stem + ending) for stem in stems for ending in (*ENDINGS, *bare)]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        folder = path if path.is_dir() else path.parent
        here = sorted({file.stem for ending in ENDINGS for file in folder.glob("*" + ending)})
        offered = f"{folder} has {', '.join(here)}" if here else f"{folder} has no {' or '.join(ENDINGS)} file"
        known = f"known by name are {', '.join(KNOWN)}, and {PACKAGED}, which needs no file"
        raise ValueError(f"data={data!r} is neither a file nor a folder/NAME of one; {offered}; {known}")
    return found


def packaged() -> Path:
    """The series in vega_datasets, found without importing it: that reads all its descriptions."""
    spec = importlib.util.find_spec("vega_datasets")
    if spec is None or spec.origin is None:
        require("vega_datasets", "series")
    return Path(str(spec and spec.origin)).parent / "_data" / f"{PACKAGED}.csv"


def read_parquet(path: Path) -> Rows:
    frame = require("pandas", "series").read_parquet(path)
    if frame.index.dtype.kind == "M":  # dates as the index, as pandas users keep them
        frame = frame.rename_axis(frame.index.name or DATE_NAMES[0]).reset_index()
    return Rows(path, frame, "row", range(1, len(frame) + 1))


def without_count(rows: Rows, date_column: str | None) -> Rows:
    """A first column without a name is what pandas writes for the index of a frame: the dates if no other column has
    them, and otherwise, if it is whole numbers, a count that means nothing."""
    frame = rows.frame
    first, *others = rows.columns or [""]
    if not first.startswith("Unnamed: ") or date_column == first:
        return rows
    counts = frame[first].dtype.kind in "iu"
    if date_column in others or any(is_date_name(name) for name in others):
        return replace(rows, frame=frame.drop(columns=first)) if counts else rows
    if counts and len(frame) and frame[first].iloc[0] in (0, 1):
        return replace(rows, frame=frame.drop(columns=first))
    return replace(rows, frame=frame.rename(columns={first: DATE_NAMES[0]}))


def find_date_column(rows: Rows, given: str | None) -> str:
    has = ", ".join(rows.columns)
    if given is not None:
        check(given in rows.columns, "date_column", given, f"one of the columns of {rows.path}: {has}")
        return given
    found = [name for name in rows.columns if is_date_name(name)]
    if len(found) != 1:
        several = f"several columns that could be the dates, {', '.join(found)}" if found else "no column called date"
        raise ValueError(f"{rows.path} has {several}; choose --date-column out of {has}")
    return found[0]


def chosen(rows: Rows, date_column: str, columns: Sequence[str]) -> list[str]:
    """The columns of the channels."""
    others = [name for name in rows.columns if name != date_column]
    allowed = "a file with columns besides the dates, separated by commas, semicolons or tabs"
    check(len(others) > 0, "data", str(rows.path), allowed)
    allowed = f"different ones of {', '.join(others)}"
    for name in columns:
        check(name in others, "columns", name, allowed)
    check(len({*columns}) == len(columns), "columns", columns, allowed)
    return [*columns] or others
