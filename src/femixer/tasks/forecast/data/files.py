"""Tables in files: encoding, separators, rows that say where they stand in the file, and columns of dates; and long
files: several series below each other (unique_id, ds, y), each with dates of its own but of one frequency."""

import codecs
import csv
import io
import itertools
import re
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from femixer.models.forecast.frames import inferred, is_working_week, read_dates, usual
from femixer.optional import require


@dataclass(frozen=True)
class Rows:
    path: Path
    frame: Any
    """pandas.DataFrame."""
    unit: str
    """What `places` counts: line or row."""
    places: Sequence[int]
    """Of each row in the file."""

    @property
    def columns(self) -> list[str]:
        return [str(name) for name in self.frame.columns]

    def refuse(self, row: int, problem: str) -> NoReturn:
        raise ValueError(f"{self.path}, {self.place(row)}: {problem}")

    def place(self, row: int) -> str:
        return f"{self.unit} {self.places[row]}"

    def numbers(self, column: str) -> np.ndarray:
        """The column [T] in float64, NaN where the cell is empty or says NaN."""
        pandas = require("pandas", "forecast")
        cells = self.frame[column]
        if cells.dtype.kind in "Mm":
            self.refuse(0, f"{column} is a date and not a number; --columns chooses among the others")
        numbers = cells if cells.dtype.kind in "iufb" else pandas.to_numeric(cells, errors="coerce")
        values = numbers.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        bad = np.flatnonzero((np.isnan(values) & cells.notna().to_numpy()) | np.isinf(values))
        if len(bad):
            cell = cells.iloc[bad[0]]
            self.refuse(bad[0], f"{column} is {repr(cell) if isinstance(cell, str) else cell}, which is not a number")
        return values


SEPARATORS = ",;\t"
HEAD, LARGE = 1 << 22, 10**8
"""Characters from the beginning that tell how a file is written; bytes from which on it takes a while to read one."""


def read_csv(path: Path, bare: tuple[str, str] | None = None, names_needed: bool = True) -> Rows:
    """bare: the first date and the step of a file that may have neither a header nor dates. names_needed: or else
    numbers in the first line are names, too."""
    pandas = require("pandas", "forecast")
    encoding = encoding_of(path)
    with path.open(encoding=encoding, newline="") as file:
        text = file.read(HEAD)
    separator = separator_of(text)
    if path.stat().st_size > LARGE:  # a minute of silence would look like a hang
        print(f"reading {path} ({path.stat().st_size / 1e6:,.0f} MB)", file=sys.stderr, flush=True)
    if bare is not None and is_bare(text, separator):
        lines = checked_lines(path, encoding, separator, named=False)
        frame = pandas.read_csv(path, encoding=encoding, sep=separator, header=None).rename(columns=str)
        frame.insert(0, "date", pandas.date_range(bare[0], periods=len(frame), freq=bare[1]))
        return Rows(path, frame, "line", lines)
    if names_needed and is_bare(text, separator):
        raise ValueError(f"{path}, line 1: it has numbers, and must name the columns, one of them the dates")
    lines = checked_lines(path, encoding, separator)
    decimal = "," if separator != "," and has_decimal_commas(text, separator) else "."
    options = {"sep": separator, "decimal": decimal, "index_col": False, "low_memory": False}
    frame = pandas.read_csv(path, encoding=encoding, **options)
    return Rows(path, frame, "line", lines)


def separator_of(text: str) -> str:
    """The one that divides the header most, and the first row into as many cells."""
    heads = {mark: _first_rows(text, mark, 2) for mark in SEPARATORS}
    several = [mark for mark, rows in heads.items() if rows and len(rows[0]) > 1]
    fitting = [mark for mark in several if len({len(row) for row in heads[mark]}) == 1]
    return max(fitting or several or [","], key=lambda mark: len(heads[mark][0]) if heads[mark] else 0)


def _first_rows(text: str, separator: str, count: int) -> list[list[str]]:
    """Those that are not empty; none where the text is not of this kind."""
    try:
        rows = (row for row in csv.reader(io.StringIO(text), delimiter=separator) if row)
        return [*itertools.islice(rows, count)]
    except csv.Error:
        return []


def is_bare(text: str, separator: str) -> bool:
    """Whether the first line has numbers instead of names."""
    cells = text.partition("\n")[0].split(separator)
    return all(re.fullmatch(r"\s*[-+]?\d*\.?\d+([eE][-+]?\d+)?\s*", cell) for cell in cells)


def has_decimal_commas(text: str, separator: str) -> bool:
    """Whether numbers of the first rows are written as 1,5: none as 1.5, and not all as 1,500, perhaps thousands."""
    cells = [cell.strip() for row in _first_rows(text, separator, 100)[1:] for cell in row]
    commas = [cell for cell in cells if re.fullmatch(r"[-+]?\d+,\d+", cell)]
    points = any(re.fullmatch(r"[-+]?\d+\.\d+", cell) for cell in cells)
    return not points and not all(re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", cell) for cell in commas)


def encoding_of(path: Path) -> str:
    """Of a file: UTF-8, UTF-16 if it says so, or else Latin-1, which has all bytes."""
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            while file.read(HEAD):
                pass
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8-sig"


def checked_lines(path: Path, encoding: str, separator: str, named: bool = True) -> Sequence[int]:
    """The line of each row below the header, or of all without one. pandas would fill up rows that are too short, and
    say nothing."""
    lines = array("q", [] if named else [1])
    with path.open(encoding=encoding, newline="") as file:
        reader = csv.reader(file, delimiter=separator)
        try:
            header = [name.strip() for name in next(reader, [])]
            if not any(header):
                raise ValueError(f"{path} is empty, or begins with an empty line; its first line must name the columns")
            if named and len({*header}) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise ValueError(f"{path}, line 1: the column {twice!r} is there twice")
            for row in filter(None, reader):
                if len(row) != len(header):
                    rest = f"{len(row)} values, {'and the header names' if named else 'not'} {len(header)}"
                    raise ValueError(f"{path}, line {reader.line_num}: it has {rest}")
                lines.append(reader.line_num)
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    return lines


def as_dates(rows: Rows, column: str, form: str | None, repeated: bool = False) -> Any:
    """The column as a pandas.DatetimeIndex, which never goes back; `repeated`: nor need it go on."""
    dates = in_any_order(rows, column, form)
    late = np.flatnonzero(dates[1:] < dates[:-1] if repeated else dates[1:] <= dates[:-1])
    if len(late):
        row = late[0] + 1
        told = "repeats that of" if dates[row] == dates[row - 1] else f"is before {dates[row - 1]} of"
        rows.refuse(row, f"{column} {dates[row]} {told} {rows.place(row - 1)}; dates must increase")
    return dates


def in_any_order(rows: Rows, column: str, form: str | None) -> Any:
    """The column as a pandas.DatetimeIndex; none of its dates is missing."""
    pandas = require("pandas", "forecast")
    cells = rows.frame[column]
    dates = pandas.DatetimeIndex(cells if cells.dtype.kind == "M" else parsed(rows, column, form))
    bad = np.flatnonzero(dates.isna())
    if len(bad):
        cell = cells.iloc[bad[0]]
        told = f"is {cell!r}, which is not a date like those before" if pandas.notna(cell) else "is missing"
        rows.refuse(bad[0], f"{column} {told}; --date-format says how dates are written")
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
    form = r"^\s*(\d{1,2})([/.-])(\d{1,2})[/.-](\d{4}|\d{2})\b(.*)$"
    if not len(texts) or re.match(form, str(texts.iloc[0])) is None:  # all rows must be like that; mostly none is
        return
    numbers = texts.astype(str).str.extract(form)
    if numbers.isna().any(axis=None):
        return
    first, second = (numbers[place].astype(int) for place in (0, 2))
    if max(first.max(), second.max()) <= 12 and (first != second).any():
        row = int((first != second).to_numpy().argmax())
        mark, year, rest = (numbers[place].iloc[row] for place in (1, 3, 4))
        # What follows, such as " 12:00", as a format.
        time = re.sub(r"\d{1,2}(:\d\d)(:\d\d)?", lambda found: "%H:%M" + (":%S" if found[2] else ""), rest, count=1)
        ending = mark + ("%Y" if len(year) == 4 else "%y") + time
        forms = " or ".join(repr(mark.join(parts) + ending) for parts in (("%d", "%m"), ("%m", "%d")))
        rows.refuse(row, f"{column} is {texts.iloc[row]!r}, and no row tells day from month; say --date-format {forms}")


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


ID = "unique_id"
"""The column by which a file is known to be long."""


class Section(NamedTuple):
    """The rows of one series."""

    name: str
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


def arranged(rows: Rows, column: str, dates: Any, values: np.ndarray, covariates: np.ndarray | None) -> dict[str, Any]:
    """Series one after the other, each in the order of its dates, with a row at every step from first to last: dates,
    values, covariates, sections and what to tell of them.

    Rows may stand in any order. Two of one series and date are an error; a step without a row is missing values.
    """
    pandas = require("pandas", "forecast")
    cells = rows.frame[column]
    missing = np.flatnonzero(cells.isna().to_numpy())
    if len(missing):
        rows.refuse(missing[0], f"{column} is missing, which says to which series the row belongs")
    both = values if covariates is None else np.concatenate([values, covariates], 1)
    table = pandas.DataFrame({"row": np.arange(len(dates))}, index=dates)
    names = cells.astype(str).to_numpy(dtype=object)
    found = {str(name): own.sort_index(kind="stable").row for name, own in table.groupby(names, sort=False)}
    for name, own in found.items():
        twice = own.index.duplicated()
        if twice.any():
            first, second = own[own.index == own.index[twice][0]].iloc[:2]
            rows.refuse(second, f"{name} {own.index[twice][0]} is there twice, first in {rows.place(first)}")
    told_by: Counter[str] = Counter()  # frequency -> rows of the series that tell it, gaps or not
    for own in found.values():
        if (known := frequency_of(own.index)) is not None:
            told_by[known] += len(own)
    if not told_by:
        raise ValueError(f"{rows.path} has no series with dates of one frequency: at least 3 dates, equal steps apart")
    frequency = told_by.most_common(1)[0][0]
    held, every, sections, at, gaps = [], [], [], 0, 0
    for name, own in found.items():
        begin, end = own.index[[0, -1]]
        steps = own.index if len(own) == 1 else pandas.date_range(begin, end, freq=frequency).as_unit(own.index.unit)
        strange = own[~own.index.isin(steps)]
        if len(strange):
            told = f"{strange.index[0]} of {name} does not fit steps of {frequency}, as those of the others"
            rows.refuse(strange.iloc[0], told)
        if len(steps) > len(own) and (wider := inferred(own.index)) is not None:
            told = f"{name} has steps of {wider}, and other series of {frequency}; all must have the same"
            rows.refuse(own.iloc[0], told)
        held.append(pandas.DataFrame(both[own], index=own.index).reindex(steps).to_numpy())
        every.append(steps)
        sections.append(Section(name, at, at + len(steps)))
        at, gaps = at + len(steps), gaps + (len(steps) > len(own))
    together, lines, targets = np.concatenate(held), at - len(dates), values.shape[1]
    told = f"{rows.path.name}: {lines} rows are missing in {gaps} of {len(sections)} series, and are missing values"
    return {
        "dates": every[0].append(every[1:]),
        "values": together[:, :targets],
        "covariates": None if covariates is None else together[:, targets:],
        "sections": tuple(sections),
        "told": (told,) if lines else (),
    }
