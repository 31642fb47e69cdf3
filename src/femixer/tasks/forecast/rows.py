"""A table as it was read, which knows where in the file each row stands: for errors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

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
        pandas = require("pandas", "series")
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
