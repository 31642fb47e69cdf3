"""Series: what is known of data sets by name, and reading a CSV or parquet file with a column of dates.

A file is wide, with one row per date and a column per channel, or long, with several series below each other.
"""

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
from femixer.tasks.forecast.data.files import ID, Rows, Section, arranged, as_dates, in_any_order, read_csv

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
    """Format of the dates, e.g. %d.%m.%Y %H:%M, if it cannot be inferred."""
    columns: tuple[str, ...] = ()
    """Columns to forecast, by default all others; of long files, which have several series below each other, y."""
    id_column: str | None = None
    """Column that says to which series a row of a long file belongs, by default unique_id if there is one."""
    known: tuple[str, ...] = ()
    """Columns that are not forecast, whose values are known ahead: covariates such as holidays and prices."""
    past: tuple[str, ...] = ()
    """Columns that are not forecast and not known ahead, as additional inputs."""
    missing_below: float | None = None
    """Values at or below this are missing; the default depends on the data set (weather: -9000)."""


@dataclass(frozen=True)
class Series:
    """Numbers over time."""

    name: str
    dates: Any
    """pandas.DatetimeIndex [T], increasing (within each section); known data sets may repeat one."""
    values: np.ndarray
    """[T, C] in float64, NaN where missing."""
    columns: tuple[str, ...]
    date_column: str = "date"
    date_format: str | None = None
    missing_below: float | None = None
    """How the file was read."""
    covariates: np.ndarray | None = None
    """[T, K + P], the known ones first."""
    known: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    id_column: str | None = None
    sections: tuple[Section, ...] = ()
    """Of a long file: the rows of each series, without gaps in their dates."""
    told: tuple[str, ...] = ()
    """What a user should know of how the file was read."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the numbers, their dates and the names of the columns."""
        digest = hashlib.sha256(repr(self.columns).encode())
        digest.update(np.ascontiguousarray(self.values).tobytes())
        digest.update(np.ascontiguousarray(self.dates.as_unit("ns").asi8).tobytes())
        if self.covariates is not None:
            digest.update(repr((self.known, self.past)).encode())
            digest.update(np.ascontiguousarray(self.covariates).tobytes())
        if self.sections:
            digest.update(repr(self.sections).encode())
        return digest.hexdigest()[:16]

    @property
    def clock(self) -> Any:
        """Dates that tell frequency and season: those of the longest series."""
        if not self.sections:
            return self.dates
        longest = max(self.sections, key=lambda section: section.rows)
        return self.dates[longest.begin : longest.end]

    def frame(self) -> Any:
        """As a pandas.DataFrame over the dates, with the covariates; a long one has the series' names in front."""
        columns, values = [*self.columns, *self.known, *self.past], self.values
        if self.covariates is not None:
            values = np.concatenate([self.values, self.covariates], 1)
        frame = require("pandas", "forecast").DataFrame(values, index=self.dates, columns=columns)
        if self.sections:
            names, lengths = zip(*((section.name, section.rows) for section in self.sections), strict=True)
            frame.insert(0, self.id_column, np.repeat(np.array(names, dtype=object), lengths))
        return frame.rename_axis(index=self.date_column)


def read(data: str, reading: Reading | None = None) -> Series:
    """The series that `data` names: a file, `folder/NAME`, or the one that comes with vega_datasets.

    Whatever is wrong with a row is a ValueError with the file, the line and what is expected.
    """
    reading = reading or Reading()
    path = locate(data)
    # A known data set is called as we write it, any other as its file.
    written = {name.lower(): name for name in KNOWN} | {known.also.lower(): name for name, known in KNOWN.items()}
    name = written.get(path.stem.lower(), path.stem)
    known = KNOWN.get(name, Known())
    rows = rows_of(path, known, reading)
    date_column = find_date_column(rows, reading.date_column)
    id_column = reading.id_column or (ID if ID in rows.columns else None)  # None: one row per date
    there = f"one of the columns of {rows.path}: {', '.join(rows.columns)}"
    check(id_column is None or id_column in rows.columns, "id_column", id_column, there)
    columns, unused = chosen(rows, [date_column, *([id_column] if id_column else [])], reading, id_column is not None)
    values = np.column_stack([rows.numbers(column) for column in columns])
    names = (*reading.known, *reading.past)
    covariates = np.column_stack([rows.numbers(column) for column in names]) if names else None
    limit = known.missing_below if reading.missing_below is None else reading.missing_below
    if limit is not None:
        values[values <= limit] = np.nan
    check(len(values) > 0, "data", data, "a file that has rows below its header")
    made = functools.partial(
        Series,
        name,
        columns=tuple(columns),
        date_column=date_column,
        date_format=reading.date_format,
        missing_below=limit,
        known=reading.known,
        past=reading.past,
    )
    if id_column is None:
        dates = as_dates(rows, date_column, reading.date_format, repeated=name in KNOWN)
        return made(dates=dates, values=values, covariates=covariates)
    found = arranged(rows, id_column, in_any_order(rows, date_column, reading.date_format), values, covariates)
    if unused:
        found["told"] += (f"{path.name}: {', '.join(unused)} not used; --known and --past name covariates",)
    return made(id_column=id_column, **found)


def rows_of(path: Path, known: Known, reading: Reading) -> Rows:
    if path.suffix == ".parquet":
        return read_parquet(path)
    return without_count(read_csv(path, known.bare, reading.date_column is None), reading.date_column)


def read_future(data: str, reading: Reading) -> Any:
    """Known covariates of rows to come, as a pandas.DataFrame with a column of dates, and one of the series' names if
    `reading` says which."""
    rows = rows_of(locate(data), Known(), reading)
    date_column = find_date_column(rows, reading.date_column)
    frame = require("pandas", "forecast").DataFrame({date_column: in_any_order(rows, date_column, reading.date_format)})
    for name in (*([reading.id_column] if reading.id_column else []), *reading.known):
        check(name in rows.columns, "future", data, f"a file with a column {name!r}; it has {', '.join(rows.columns)}")
        frame[name] = rows.frame[name].astype(str) if name == reading.id_column else rows.numbers(name)
    return frame


def locate(data: str) -> Path:
    """The file that is meant."""
    path = Path(data)
    if path.is_file():
        return path
    if data == PACKAGED:  # found without importing vega_datasets: that reads all its descriptions
        spec = importlib.util.find_spec("vega_datasets")
        if spec is None or spec.origin is None:
            require("vega_datasets", "forecast")
        return Path(str(spec and spec.origin)).parent / "_data" / f"{PACKAGED}.csv"
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


def read_parquet(path: Path) -> Rows:
    frame = require("pandas", "forecast").read_parquet(path)
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
    dated = date_column in others or any(is_date_name(name) for name in others)
    if counts and (dated or (len(frame) and frame[first].iloc[0] in (0, 1))):
        return replace(rows, frame=frame.drop(columns=first))
    return rows if dated else replace(rows, frame=frame.rename(columns={first: DATE_NAMES[0]}))


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


TARGET = "y"
"""The column that is forecast in a long file, unless another is named."""


def chosen(rows: Rows, taken: Sequence[str], reading: Reading, long: bool) -> tuple[list[str], list[str]]:
    """The columns of the channels, and those that are left over; `taken` are dates and names of series."""
    columns = reading.columns
    others = [name for name in rows.columns if name not in taken]
    allowed = "a file with columns besides the dates, separated by commas, semicolons or tabs"
    check(len(others) > 0, "data", str(rows.path), allowed)
    covariates = (*reading.known, *reading.past)
    for option, names in (("columns", columns), ("known", reading.known), ("past", reading.past)):
        allowed = f"different ones of {', '.join(others)}, the columns of {rows.path}"
        for name in names:
            check(name in others, option, name, allowed)
        check(len({*names}) == len(names), option, names, allowed)
    twice = [name for name in covariates if name in columns or covariates.count(name) > 1]
    allowed = f"others than --past and --columns have: {', '.join(twice)} is there twice"
    check(not twice, "known", reading.known, allowed)
    rest = [name for name in others if name not in covariates]
    if not long:
        check(len(rest) > 0, "known", covariates, f"fewer: no column of {rows.path} is left to forecast")
        return [*columns] or rest, []
    wanted = [*columns] or ([TARGET] if TARGET in rest else rest)
    check(len(wanted) == 1, "columns", wanted, f"one of {', '.join(rest)}: a long file has one column to forecast")
    return wanted, [name for name in rest if name not in wanted]
