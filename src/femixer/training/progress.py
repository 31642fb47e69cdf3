"""Showing training: a bar on a terminal, one line per evaluation elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from femixer.optional import MissingExtra, require


class Display(Protocol):
    """What the training loop tells its watcher."""

    def stepped(self, step: int, losses: Mapping[str, Tensor]) -> None: ...

    def evaluated(self, step: int, records: Sequence[Mapping[str, Any]]) -> None: ...


@contextmanager
def display(start: int, steps: int) -> Iterator[Display]:
    """The display that suits standard error, for steps `start` to `steps`."""
    if sys.stderr.isatty():
        try:
            rich = require("rich.progress", "cli")
        except MissingExtra:
            pass
        else:
            console = require("rich.console", "cli").Console(stderr=True)
            columns = (
                rich.TextColumn("{task.completed}/{task.total} steps"),
                rich.BarColumn(),
                rich.TextColumn("{task.fields[loss]}"),
                rich.TextColumn("{task.fields[rate]}"),
                rich.TimeRemainingColumn(),
            )
            with rich.Progress(*columns, console=console) as bar:
                yield Bar(bar, start, steps)
            return
    yield Lines(steps)


class Lines:
    """One line per evaluation."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, step: int, losses: Mapping[str, Tensor]) -> None:
        pass

    def evaluated(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        print(evaluation_line(step, self.steps, records), file=sys.stderr, flush=True)


class Bar:
    """A bar with the losses, steps per second and the time left, below one line per evaluation."""

    REFRESH_SECONDS = 0.25

    def __init__(self, bar: Any, start: int, steps: int) -> None:
        self.bar, self.start, self.steps = bar, start, steps
        self.began = self.drawn = time.monotonic()
        self.task = bar.add_task("", total=steps, completed=start, loss="", rate="")

    def stepped(self, step: int, losses: Mapping[str, Tensor]) -> None:
        now = time.monotonic()
        # Reading a loss waits for the device, so not at every step.
        if now - self.drawn < self.REFRESH_SECONDS and step < self.steps:
            return
        self.drawn = now
        loss = " ".join(f"{name} {value.item():.4g}" for name, value in losses.items())
        rate = f"{(step - self.start) / (now - self.began):.1f} steps/s"
        self.bar.update(self.task, completed=step, loss=loss, rate=rate)

    def evaluated(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        self.bar.console.print(evaluation_line(step, self.steps, records), highlight=False)


def evaluation_line(step: int, steps: int, records: Sequence[Mapping[str, Any]]) -> str:
    """`step 100/2000 | FEM mse 0.42 accuracy 0.07 | ...`: texts stand for themselves, numbers get their name."""

    def words(record: Mapping[str, Any]) -> Iterator[str]:
        for name, value in record.items():
            if name not in ("step", "seconds") and value is not None:
                yield value if isinstance(value, str) else f"{name} {value:.4g}"

    return " | ".join([f"step {step}/{steps}", *(" ".join(words(record)) for record in records)])
