"""CSV files: their encoding, and rows that do not have the columns of the header."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from femixer.optional import require
from femixer.tasks.series.rows import Rows


def read_csv(path: Path) -> Rows:
    text = decoded(path)
    lines = checked_lines(text, path)
    frame = require("pandas", "series").read_csv(io.StringIO(text), index_col=False, low_memory=False)
    return Rows(path, frame, "line", lines)


def decoded(path: Path) -> str:
    """The text of a file in UTF-8, or else in Latin-1, which has a character for every byte."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def checked_lines(text: str, path: Path) -> list[int]:
    """The line of each row. pandas would fill up rows that are too short, and say nothing."""
    reader = csv.reader(io.StringIO(text, newline=""))
    lines: list[int] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        if not any(header):
            raise ValueError(f"{path} is empty, or begins with an empty line; its first line must name the columns")
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
