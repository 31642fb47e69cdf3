"""A progress bar on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from femixer.optional import require


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
