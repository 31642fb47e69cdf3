"""The table that every report is made of: columns, groups of rows, cells. How it looks is the writers' business."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from femixer.options import check

Mark = Literal["", "best", "second"]
PLACES = ("table", "group")
"""Columns of CSV with the titles of tables and groups, where there are any."""


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, and what stands beside it; empty where there is none."""

    value: str = ""
    error: str = ""
    """Standard error, or another spread that the notes name."""
    missing: str = ""
    """What is finished, where that is not all: "2 of 3 seeds"."""
    paper: str = ""
    """The published figure."""
    mark: Mark = ""

    @property
    def best(self) -> bool:
        return self.mark == "best"


@dataclass(frozen=True)
class Column:
    title: str
    """A line break is one where the format has them, and else a space."""
    key: str = ""
    """Name in CSV; the title in lower case if none is given."""
    align: Literal["left", "right"] = "left"
    scores: bool = False
    """Cells are numbers that are compared, not names or sizes; aligned to the right whatever `align` says."""
    block: str = ""
    """A heading over this column and its neighbours of the same block."""
    hidden: bool = False
    """In CSV only."""

    @property
    def name(self) -> str:
        return self.key or re.sub(r"\W+", "_", self.title.lower()).strip("_")

    @property
    def right(self) -> bool:
        return self.scores or self.align == "right"


Row = Sequence[Cell | str]
"""A cell per column; text is text, whatever characters it has."""


@dataclass(frozen=True)
class Group:
    """Rows that stand together, below their title if they have one."""

    rows: Sequence[Row]
    title: str = ""


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    groups: Sequence[Group]
    title: str = ""
    notes: Sequence[str] = ()
    """Sentences below the table: what a reader must know."""
    empty: str = "–"
    """What stands where a Cell has neither value nor reason."""
    stacked: bool = False
    """In LaTeX: what stands beside a number stands below it, in a \\makecell."""
    melted: tuple[str, str] | None = None
    """In CSV: one line per score instead of one per row. The names of the column that says which score it is, and of
    its value."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        check(bool(names) and not twice, "columns", twice, "at least one, each with a key of its own")
        for name in names:
            check(name not in PLACES, "key", name, f"another than {' and '.join(PLACES)}, which CSV has for titles")
        for row in self.rows:
            check(len(row) == len(names), "row", row, f"{len(names)} cells: {', '.join(names)}")

    @classmethod
    def of(cls, columns: Sequence[Column | str], rows: Sequence[Row], title: str = "", *notes: str) -> Table:
        """One group of rows; of columns that are titles only, the first holds names and the others numbers."""
        made = [
            Column(column, align="right" if number else "left") if isinstance(column, str) else column
            for number, column in enumerate(columns)
        ]
        return cls(made, [Group(rows)], title, notes)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def header(self) -> list[str]:
        return [column.title for column in self.columns]
