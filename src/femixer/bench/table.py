"""Tables of results: drawn on the terminal, and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from femixer.optional import require

# Where there is no terminal there is no width to keep to.
WIDTH_OF_A_FILE = 200


@dataclass(frozen=True)
class Table:
    """Cells are text already; the first column is the name of the row, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        alignment = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.header, alignment, *self.rows)]
        return "\n".join([self.title, "", *lines])

    def show(self) -> None:
        console, table, text = (require(f"rich.{name}", "cli") for name in ("console", "table", "text"))
        drawn = table.Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.header):
            drawn.add_column(name, justify="right" if number else "left")
        for cells in self.rows:
            drawn.add_row(*(text.Text(cell) for cell in cells))  # Text: brackets in a cell are not markup
        console.Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE).print(drawn)
