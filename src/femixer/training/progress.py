"""Showing training: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from femixer.optional import MissingExtra, require

Records = Sequence[Mapping[str, Any]]


class Display(Protocol):
    """What the training loop tells its watcher."""

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None: ...

    def trained(self, step: int, records: Records) -> None: ...

    def evaluated(self, step: int, records: Records) -> None: ...

    def sampled(self, samples: Records) -> None: ...


@contextmanager
def display(start: int, steps: int, shown: bool = True) -> Iterator[Display]:
    """The display that suits standard error, for steps `start` to `steps`, or one that shows nothing."""
    if not shown:
        yield Silence()
        return
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


class Silence:
    """Nothing."""

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None:
        pass

    def trained(self, step: int, records: Records) -> None:
        pass

    def evaluated(self, step: int, records: Records) -> None:
        pass

    def sampled(self, samples: Records) -> None:
        pass


class Lines(Silence):
    """One line per record, and the samples."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def trained(self, step: int, records: Records) -> None:
        print(record_line(step, self.steps, records), file=sys.stderr, flush=True)

    evaluated = trained

    def sampled(self, samples: Records) -> None:
        for sample in samples:
            print(sample_text(sample), file=sys.stderr, flush=True)


class Bar(Silence):
    """A bar with the losses, the speed and the time left, below one line per evaluation and its samples."""

    REFRESH_SECONDS = 0.25

    def __init__(self, bar: Any, start: int, steps: int) -> None:
        self.bar, self.steps = bar, steps
        self.drawn = time.monotonic()
        self.task = bar.add_task("", total=steps, completed=start, loss="", rate="")

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None:
        now = time.monotonic()
        # Reading a loss waits for the device, so not at every step.
        if now - self.drawn < self.REFRESH_SECONDS and step < self.steps:
            return
        self.drawn = now
        loss = " ".join(f"{name} {float(value):.4g}" for name, value in losses().items())
        self.bar.update(self.task, completed=step, loss=loss, rate=rate)

    def evaluated(self, step: int, records: Records) -> None:
        self.bar.console.print(record_line(step, self.steps, records), highlight=False, markup=False)

    def sampled(self, samples: Records) -> None:
        for sample in samples:
            self.bar.console.print(sample_text(sample), highlight=False, markup=False)


def record_line(step: int, steps: int, records: Records) -> str:
    """`step 100/2000 | FEM mse 0.42 accuracy 0.07 | ...`: texts stand for themselves, numbers get their name."""

    def words(record: Mapping[str, Any]) -> Iterator[str]:
        for name, value in record.items():
            if name not in ("step", "seconds") and value is not None:
                yield value if isinstance(value, str) else f"{name} {number(value)}"

    return " | ".join([f"step {step}/{steps}", *(" ".join(words(record)) for record in records)])


def number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def sample_text(sample: Mapping[str, Any]) -> str:
    """`    name: its text`, indented throughout."""
    lines = "\n".join(f"{name}: {value}" for name, value in sample.items() if value != "")
    return "\n".join(f"    {line}" for line in lines.splitlines())
