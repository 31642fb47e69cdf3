"""Showing how the jobs get on: a bar on a terminal with a line per job, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from femixer.optional import MissingExtra, require
from femixer.training.jobs.work import Outcome


@contextmanager
def progress(jobs: int) -> Iterator[Callable[[Outcome], None]]:
    """Gives the function that is told each outcome."""
    rich = None
    if sys.stderr.isatty():
        with suppress(MissingExtra):
            rich = require("rich.progress", "cli")
    if rich is None:
        yield Lines(jobs)
        return
    console = require("rich.console", "cli").Console(stderr=True)
    columns = (rich.TextColumn("{task.completed}/{task.total} jobs"), rich.BarColumn(), rich.TimeRemainingColumn())
    # Jobs take minutes or hours: all of them, and not the last half minute, tell how long one takes.
    with rich.Progress(*columns, console=console, speed_estimate_period=float("inf")) as bar:
        task = bar.add_task("", total=jobs)

        def show(outcome: Outcome) -> None:
            bar.console.print(line(outcome), highlight=False, markup=False)
            bar.advance(task)

        yield show


class Lines:
    """`job 3/36, 12 minutes left: ...`"""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.done, self.began = jobs, 0, time.monotonic()

    def __call__(self, outcome: Outcome) -> None:
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.jobs - self.done)
        told = f"job {self.done}/{self.jobs}, {duration(left)} left: {line(outcome)}"
        print(told, file=sys.stderr, flush=True)


def line(outcome: Outcome) -> str:
    """What became of a job."""
    job = outcome.job
    if outcome.error is not None:
        return f"{job.title} FAILED: {outcome.error.strip().splitlines()[-1]}"
    if outcome.record is None:
        return f"{job.title} is left to another process, which is at it"
    return f"{job.title}: {job.summary(outcome.record)}, {duration(outcome.record['seconds'])}"


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
