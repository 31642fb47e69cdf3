"""CSV files: their encoding, what separates their columns, and rows that do not have the columns of the header."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from pathlib import Path

from femixer.optional import require
from femixer.tasks.forecast.rows import Rows

SEPARATORS = ",;\t"


def read_csv(path: Path, bare: tuple[str, str] | None = None, names_needed: bool = True) -> Rows:
    """bare: the first date and the step of a file that may have neither a header nor dates. names_needed: or else
    numbers in the first line are names, too."""
    pandas = require("pandas", "series")
    text = decoded(path)
    separator = separator_of(text)
    if bare is not None and is_bare(text, separator):
        lines = checked_lines(text, path, separator, named=False)
        frame = pandas.read_csv(io.StringIO(text), sep=separator, header=None).rename(columns=str)
        frame.insert(0, "date", pandas.date_range(bare[0], periods=len(frame), freq=bare[1]))
        return Rows(path, frame, "line", lines)
    if names_needed and is_bare(text, separator):
        raise ValueError(f"{path}, line 1: it has numbers, and must name the columns, one of them the dates")
    lines = checked_lines(text, path, separator)
    decimal = "," if separator != "," and has_decimal_commas(text, separator) else "."
    frame = pandas.read_csv(io.StringIO(text), sep=separator, decimal=decimal, index_col=False, low_memory=False)
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


def decoded(path: Path) -> str:
    """The text of a file in UTF-8, in UTF-16 if it says so, or else in Latin-1, which has all bytes."""
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def checked_lines(text: str, path: Path, separator: str, named: bool = True) -> list[int]:
    """The line of each row below the header, or of all without one. pandas would fill up rows that are too short, and
    say nothing."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines: list[int] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        if not any(header):
            raise ValueError(f"{path} is empty, or begins with an empty line; its first line must name the columns")
        if named and len({*header}) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: the column {twice!r} is there twice")
        if not named:
            lines.append(1)
        for row in reader:
            if row and len(row) != len(header):
                has = f"it has {len(row)} values, and the header names" if named else f"it has {len(row)} values, not"
                raise ValueError(f"{path}, line {reader.line_num}: {has} {len(header)}")
            if row:
                lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    return lines
