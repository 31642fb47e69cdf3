"""Tables of results: drawn on the terminal, and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from femixer.bench.measure import Spread
from femixer.optional import require

# Where there is no terminal there is no width to keep to.
WIDTH_OF_A_FILE = 200


@dataclass(frozen=True)
class Table:
    """Cells are text already; the first column is the name of the row, the others are numbers.

    note: shown below the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        alignment = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, alignment, *self.rows)]
        return "\n".join([self.title, "", *lines, *(["", self.note] if self.note else [])])

    def show(self) -> None:
        console, table, text = (require(f"rich.{name}", "cli") for name in ("console", "table", "text"))
        drawn = table.Table(title=self.title, title_justify="left", caption=self.note or None, caption_justify="left")
        for number, name in enumerate(self.header):
            drawn.add_column(name, justify="right" if number else "left")
        for cells in self.rows:
            drawn.add_row(*(text.Text(cell) for cell in cells))  # Text: brackets in a cell are not markup
        console.Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE).print(drawn)


def ratio_cell(ratio: Spread | float, target: float | None = None) -> str:
    """A ratio, with its quartiles where it has them, and beside a target whether it is kept."""
    if isinstance(ratio, Spread):
        value, text = ratio.median, f"{ratio.median:.3f} [{ratio.q1:.3f}–{ratio.q3:.3f}]"
    else:
        value, text = ratio, f"{ratio:.3f}"
    return text if target is None else f"{text} {'≤' if value <= target else '>'} {target:.2f}"
