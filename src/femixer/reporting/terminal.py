"""What a person at the terminal sees: a progress bar on standard error, and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from femixer.optional import require
from femixer.reporting.table import Cell, Table
from femixer.reporting.writers import beside

# Where there is no terminal there is no width to keep to.
WIDTH_OF_A_FILE = 200


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives the function that moves the bar by one."""
    rich, console = require("rich.progress", "cli"), require("rich.console", "cli").Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{what:<18}", total=total)
        yield lambda: bar.advance(task)


def show(*tables: Table, width_of_a_file: int = WIDTH_OF_A_FILE) -> None:
    """Draw tables on standard output."""
    rich = require("rich.table", "cli")
    console = require("rich.console", "cli").Console(width=None if sys.stdout.isatty() else width_of_a_file)
    for table in tables:
        notes = "\n".join(table.notes)
        drawn = rich.Table(
            title=_text(table.title), title_justify="left", caption=_text(notes) if notes else None,
            caption_justify="left",
        )  # fmt: skip
        places = [number for number, column in enumerate(table.columns) if not column.hidden]
        for column in (table.columns[number] for number in places):
            drawn.add_column(_text(column.title), justify="right" if column.right else "left")
        for group in table.groups:
            if group.title:
                drawn.add_section()
                drawn.add_row(_text(group.title, "bold"))
            for row in group.rows:
                drawn.add_row(*(_drawn(row[number], table.empty) for number in places))
        console.print(drawn)


def _drawn(cell: Cell | str, empty: str) -> Any:
    if isinstance(cell, str):
        return _text(cell)
    style = {"": "", "best": "bold", "second": "underline"}[cell.mark]
    return _text(beside(cell, str, {cell.mark: "{}"}, empty), style)


def _text(text: str, style: str = "") -> Any:
    """As it is: brackets in it are not markup."""
    return require("rich.text", "cli").Text(text, style)
