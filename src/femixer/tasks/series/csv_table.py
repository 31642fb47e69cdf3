"""CSV files: their encoding, what separates their columns, and rows that do not have the columns of the header."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from pathlib import Path
from typing import Any

from femixer.optional import require
from femixer.tasks.series.rows import Rows

SEPARATORS = ",;\t"


def read_csv(path: Path, bare: tuple[str, str] | None = None) -> Rows:
    """bare: the first date and the step of a file that may have neither a header nor dates."""
    pandas = require("pandas", "series")
    text = decoded(path)
    separator = max(SEPARATORS, key=lambda mark: len(next(csv.reader(io.StringIO(text), delimiter=mark), [])))
    if bare is not None and is_bare(text, separator):
        frame = pandas.read_csv(io.StringIO(text), sep=separator, header=None).rename(columns=str)
        frame.insert(0, "date", pandas.date_range(bare[0], periods=len(frame), freq=bare[1]))
        return Rows(path, frame, "line", range(1, len(frame) + 1))
    lines = checked_lines(text, path, separator)
    decimal = "," if separator != "," and has_decimal_commas(text, separator) else "."
    frame = pandas.read_csv(io.StringIO(text), sep=separator, decimal=decimal, index_col=False, low_memory=False)
    return Rows(path, without_index(frame, text), "line", lines)


def is_bare(text: str, separator: str) -> bool:
    """Whether the first line has numbers instead of names."""
    cells = text.partition("\n")[0].split(separator)
    return all(re.fullmatch(r"\s*[-+]?\d*\.?\d+([eE][-+]?\d+)?\s*", cell) for cell in cells)


def has_decimal_commas(text: str, separator: str) -> bool:
    """Whether a cell of the first rows is a number as 1,5."""
    rows = itertools.islice(csv.reader(io.StringIO(text), delimiter=separator), 1, 100)
    return any(re.fullmatch(r"\s*[-+]?\d+,\d+\s*", cell) for row in rows for cell in row)


def without_index(frame: Any, text: str) -> Any:
    """A first column without a name is what pandas writes for a frame's index: dates, or a count that means nothing."""
    first = frame.columns[0]
    if text.lstrip('"')[:1] not in SEPARATORS or not str(first).startswith("Unnamed"):
        return frame
    if frame[first].dtype.kind in "iu" and (frame[first].diff().dropna() == 1).all():
        return frame.drop(columns=first)
    return frame if "date" in frame.columns else frame.rename(columns={first: "date"})


def decoded(path: Path) -> str:
    """The text of a file in UTF-8, in UTF-16 if it says so, or else in Latin-1, which has all bytes."""
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def checked_lines(text: str, path: Path, separator: str) -> list[int]:
    """The line of each row. pandas would fill up rows that are too short, and say nothing."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines: list[int] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        if not any(header):
            raise ValueError(f"{path} is empty, or begins with an empty line; its first line must name the columns")
        if is_bare(text, separator):
            raise ValueError(f"{path}, line 1: it has numbers, and must name the columns, one of them the dates")
        if len({*header}) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: the column {twice!r} is there twice")
        for row in reader:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num}: it has {len(row)} values, and the header names {len(header)}"
                )
            if row:
                lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    return lines
