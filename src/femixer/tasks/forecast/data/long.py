"""Long files: several series below each other (unique_id, ds, y), each with dates of its own but of one frequency."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from femixer.models.forecast.frames import inferred, usual
from femixer.optional import require
from femixer.tasks.forecast.data.files import Rows

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


@dataclass(frozen=True)
class Arranged:
    """Series one after the other, each in the order of its dates, with a row at every step from first to last."""

    dates: Any
    values: np.ndarray
    covariates: np.ndarray | None
    sections: tuple[Section, ...]
    told: tuple[str, ...]


def arranged(rows: Rows, column: str, dates: Any, values: np.ndarray, covariates: np.ndarray | None) -> Arranged:
    """Rows may stand in any order. Two of one series and date are an error; a step without a row is missing values."""
    pandas = require("pandas", "series")
    cells = rows.frame[column]
    missing = np.flatnonzero(cells.isna().to_numpy())
    if len(missing):
        rows.refuse(missing[0], f"{column} is missing, which says to which series the row belongs")
    codes, names = pandas.factorize(cells.astype(str).to_numpy(dtype=object))
    order = np.lexsort((dates.asi8, codes))
    codes, dates = codes[order], dates[order]
    twice = np.flatnonzero((codes[1:] == codes[:-1]) & (dates[1:] == dates[:-1]))
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2])
        rows.refuse(second, f"{names[codes[twice[0]]]} {dates[twice[0]]} is there twice, first in {rows.place(first)}")
    ends = np.flatnonzero(np.r_[codes[1:] != codes[:-1], True]) + 1
    pieces = [*zip([0, *ends[:-1]], ends, strict=True)]
    frequency = common_frequency(rows, [dates[begin:end] for begin, end in pieces])
    both = values if covariates is None else np.concatenate([values, covariates], 1)
    both, at, new_dates, held, gaps = both[order], 0, [], [], 0
    sections = []
    for begin, end in pieces:
        name, own = str(names[codes[begin]]), dates[begin:end]
        every = own if len(own) == 1 else pandas.date_range(own[0], own[-1], freq=frequency).as_unit(own.unit)
        where = every.get_indexer(own)
        if (where < 0).any():
            row = begin + int((where < 0).argmax())
            rows.refuse(order[row], f"{dates[row]} of {name} does not fit steps of {frequency}, as those of the others")
        if len(every) > len(own) and inferred(own) is not None:
            told = f"{name} has steps of {inferred(own)}, and other series of {frequency}; all must have the same"
            rows.refuse(order[begin], told)
        filled = np.full((len(every), both.shape[1]), np.nan)
        filled[where] = both[begin:end]
        sections.append(Section(name, at, at + len(every)))
        at += len(every)
        gaps += len(every) > len(own)
        new_dates.append(every)
        held.append(filled)
    together, lines = np.concatenate(held), at - len(dates)
    filled_in = (
        f"{rows.path.name}: {lines} rows are missing in {gaps} of {len(sections)} series, and are missing values"
    )
    targets = values.shape[1]
    return Arranged(
        new_dates[0].append(new_dates[1:]),
        together[:, :targets],
        None if covariates is None else together[:, targets:],
        tuple(sections),
        (filled_in,) if lines else (),
    )


def common_frequency(rows: Rows, pieces: list[Any]) -> str:
    """Of most rows whose series tell one, gaps or not."""
    found: Counter[str] = Counter()
    for dates in pieces:
        own = inferred(dates) or usual(dates)
        if own is not None:
            found[str(getattr(own, "freqstr", own))] += len(dates)
    if not found:
        raise ValueError(f"{rows.path} has no series with dates of one frequency: at least 3 dates, equal steps apart")
    return found.most_common(1)[0][0]
