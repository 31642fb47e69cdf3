"""Ranks as in the paper's table.

In each column the rows of a group are ranked from 1, higher values first; equal values share the better rank, and the
next rank is left out (0.3, 0.3, 0.2 have ranks 1, 1, 3). A row's average rank is over its columns, and its firsts are
the columns where it has rank 1, alone or not. A missing value takes no part: the others are ranked without it, and the
row's average is over the columns that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = float | None


@dataclass(frozen=True)
class Ranking:
    """Of one row."""

    average: Value  # None if the row has no value at all
    firsts: int


def ranks(column: Sequence[Value]) -> list[int | None]:
    """1 + how many are higher; None where there is no value."""
    there = [value for value in column if value is not None]
    return [None if value is None else 1 + sum(other > value for other in there) for value in column]


def rank(rows: Sequence[Sequence[Value]]) -> list[Ranking]:
    """The ranking of each row among `rows`, which are values column by column."""
    columns = [ranks(column) for column in zip(*rows, strict=True)]
    rankings = []
    for row in range(len(rows)):
        own = [column[row] for column in columns]
        there = [place for place in own if place is not None]
        rankings.append(Ranking(sum(there) / len(there) if there else None, there.count(1)))
    return rankings


def best_two(column: Sequence[Value], higher_is_better: bool = True) -> tuple[Value, Value]:
    """The best and the second-best value, which differ; None where there is none."""
    there = sorted({value for value in column if value is not None}, reverse=higher_is_better)
    best, second, *_ = [*there, None, None]
    return best, second
