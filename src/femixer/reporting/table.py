"""What every report is made of: scores and tables. How a table looks is the writers' business.

A table has columns, groups of rows and cells. Scores are numbers of several runs: means over seeds with their errors,
differences of pairs, ranks, and who is best. What a table shows is what is compared: two means that differ only in
digits that are not shown are equally good.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from femixer.options import check

Mark = Literal["", "best", "second"]
PLACES = ("table", "group")
"""Columns of CSV with the titles of tables and groups, where there are any."""


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, with its annotations; empty where there is none."""

    value: str = ""
    error: str = ""
    """Standard error, or another spread that the notes name."""
    missing: str = ""
    """What is finished, if not everything: "2 of 3 seeds"."""
    paper: str = ""
    """The published figure."""
    mark: Mark = ""

    @property
    def best(self) -> bool:
        return self.mark == "best"


@dataclass(frozen=True)
class Column:
    title: str
    """Line breaks become spaces in formats without them."""
    key: str = ""
    """Name in CSV; the title in lower case if none is given."""
    align: Literal["left", "right"] = "left"
    scores: bool = False
    """Cells are numbers that are compared, not names or sizes; aligned to the right whatever `align` says."""
    block: str = ""
    """A common heading over neighbouring columns of the same block."""
    hidden: bool = False
    """Shown in CSV only."""

    @property
    def name(self) -> str:
        return self.key or re.sub(r"\W+", "_", self.title.lower()).strip("_")

    @property
    def right(self) -> bool:
        return self.scores or self.align == "right"


Row = Sequence[Cell | str]
"""A cell per column; special characters of text are escaped."""


@dataclass(frozen=True)
class Group:
    """Rows under a common title, if there is one."""

    rows: Sequence[Row]
    title: str = ""


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    groups: Sequence[Group]
    title: str = ""
    notes: Sequence[str] = ()
    """Sentences below the table."""
    empty: str = "–"
    """Shown where a Cell has neither a value nor `missing`."""
    stacked: bool = False
    """In LaTeX: annotations stand below the number, in a \\makecell."""
    melted: tuple[str, str] | None = None
    """In CSV: one line per score instead of one per row. The names of two columns: which score it is, and its value."""

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


Value = float | None
Item = TypeVar("Item")


@dataclass(frozen=True)
class Score:
    """What one model reached, by seed."""

    scores: Mapping[int, float] = field(default_factory=dict)
    """seed -> score: only of seeds whose jobs are all finished."""
    seeds: int = 0
    """In all results, whatever the model."""
    jobs: int = 0
    """Finished, of all seeds."""
    expected: int = 0
    """Jobs, of all seeds."""

    @property
    def mean(self) -> Value:
        return statistics.mean(self.scores.values()) if self.scores else None

    @property
    def deviation(self) -> Value:
        """Standard deviation over seeds."""
        return statistics.stdev(self.scores.values()) if len(self.scores) > 1 else None

    @property
    def error(self) -> Value:
        """Standard error of the mean over seeds."""
        return None if self.deviation is None else self.deviation / math.sqrt(len(self.scores))

    @property
    def complete(self) -> bool:
        return len(self.scores) == self.seeds

    @property
    def missing(self) -> str:
        """What is finished, where that is not all; nothing where nothing is."""
        if self.scores:
            return "" if self.complete else f"{len(self.scores)} of {self.seeds} seeds"
        return f"{self.jobs} of {self.expected} jobs" if 0 < self.jobs < self.expected else ""

    def cell(
        self,
        digits: int,
        scale: float = 1,
        paper: str = "",
        spread: Literal["error", "deviation"] = "error",
        signed: bool = False,
    ) -> Cell:
        """The mean times `scale` and its spread, to so many digits; signed: with a plus where it is not negative."""
        if self.mean is None:
            return Cell(missing=self.missing, paper=paper)
        width = self.error if spread == "error" else self.deviation
        value = f"{scale * self.mean:{'+' if signed else ''}.{digits}f}"
        return Cell(value, "" if width is None else f"{abs(scale) * width:.{digits}f}", self.missing, paper)


def mean_of(parts: Sequence[Score]) -> Score:
    """The mean over several scores, such as those of several tasks, of the seeds that all of them have."""
    shared = sorted(set.intersection(*({*part.scores} for part in parts)))
    scores = {seed: statistics.mean(part.scores[seed] for part in parts) for seed in shared}
    jobs, expected = (sum(getattr(part, name) for part in parts) for name in ("jobs", "expected"))
    return Score(scores, max(part.seeds for part in parts), jobs, expected)


def difference(ours: Score, reference: Score) -> Score:
    """ours - reference of the same seed: what a seed does to both cancels."""
    shared = sorted({*ours.scores} & {*reference.scores})
    scores = {seed: ours.scores[seed] - reference.scores[seed] for seed in shared}
    return Score(scores, max(ours.seeds, reference.seeds), min(ours.jobs, reference.jobs), ours.expected)


def number(text: str) -> Value:
    """What a shown number is, thousands in commas and all; None where the text is no finite number."""
    plain = text.strip().removesuffix("%").replace(",", "")
    return float(plain) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", plain, re.ASCII | re.I) else None


def marked(cells: Sequence[Cell], higher: bool = True, second: bool = False) -> list[Cell]:
    """The cells with a mark on the best, and on the second-best if asked for. Where something is missing is none."""
    values = [None if cell.missing else number(cell.value) for cell in cells]
    first, next_best = best_two(values, higher)

    def mark(value: Value) -> Mark:
        if value is None:
            return ""
        return "best" if value == first else "second" if second and value == next_best else ""

    return [replace(cell, mark=mark(value)) for cell, value in zip(cells, values, strict=True)]


def marked_columns(
    rows: Sequence[Sequence[Cell]], higher: bool | Sequence[bool] = True, second: bool = False
) -> list[list[Cell]]:
    """The same for each column of a block of cells; higher: for all columns, or for each."""
    columns = transposed(rows)
    ways = [higher] * len(columns) if isinstance(higher, bool) else higher
    found = [marked(column, way, second) for column, way in zip(columns, ways, strict=True)]
    return transposed(found) if found else [[] for _ in rows]


def transposed(rows: Sequence[Sequence[Item]]) -> list[list[Item]]:
    return [[*column] for column in zip(*rows, strict=True)]


def best_two(column: Sequence[Value], higher: bool = True) -> tuple[Value, Value]:
    """The best and the second-best value, which differ; None where there is none."""
    there = sorted({value for value in column if value is not None}, reverse=higher)
    best, second, *_ = [*there, None, None]
    return best, second


@dataclass(frozen=True)
class Ranking:
    """Of one row. average: over the columns that it has, None if it has none; firsts: where it has rank 1."""

    average: Value
    firsts: int


def ranks(column: Sequence[Value], higher: bool = True) -> list[int | None]:
    """1 + how many are better; None where there is no value.

    Equal values share the better rank, and the next one is left out: 0.3, 0.3, 0.2 have ranks 1, 1, 3.
    """
    there = [value for value in column if value is not None]
    sign = 1 if higher else -1
    return [None if value is None else 1 + sum(sign * other > sign * value for other in there) for value in column]


def rank(rows: Sequence[Sequence[Value]], higher: bool = True) -> list[Ranking]:
    """The ranking of each row among `rows`. A missing value takes no part: the others are ranked without it."""
    check(len({len(row) for row in rows}) < 2, "rows", [len(row) for row in rows], "rows of one length")
    columns = [ranks(column, higher) for column in zip(*rows, strict=True)]
    placed = [[place for column in columns if (place := column[row]) is not None] for row in range(len(rows))]
    return [Ranking(statistics.mean(there) if there else None, there.count(1)) for there in placed]


def half_up(average: float) -> float:
    """Two digits, 7.625 as 7.63: `round` would go to the even one, and the paper does not."""
    return math.floor(average * 100 + 0.5) / 100


# Quantiles 0.975 of Student's t by degrees of freedom; beyond, the last ones of these bounds.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_LARGER = ((120, 1.980), (60, 2.000), (40, 2.021), (30, 2.042))


@dataclass(frozen=True)
class Difference:
    """The mean of `count` differences and half the width of its 95 % interval, infinite where there are too few."""

    mean: float
    half_width: float
    count: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        check(len(differences) > 0, "differences", list(differences), "at least one pair")
        mean, count = statistics.mean(differences), len(differences)
        if count == 1:
            return cls(mean, math.inf, 1)
        return cls(mean, student(count - 1) * statistics.stdev(differences) / math.sqrt(count), count)

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves zero out."""
        return abs(self.mean) > self.half_width

    def text(self, digits: int) -> str:
        if math.isinf(self.half_width):
            return f"{self.mean:+.{digits}f}"
        low, high = self.mean - self.half_width, self.mean + self.half_width
        return f"{self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def student(freedom: int) -> float:
    """Quantile 0.975 of Student's t; between the known ones the larger, so that no interval is too short."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return next(quantile for bound, quantile in _LARGER if freedom >= bound)
