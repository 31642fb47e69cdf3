"""Showing how tokenizing gets on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from femixer.optional import MissingExtra, require
from femixer.tasks.lm.corpus import TRAIN

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def reporting(
    folder: Path, parts: int, done: Iterable[Mapping[str, Mapping[str, int]]], limit: int | None
) -> Iterator[Callable[[Mapping[str, Mapping[str, int]]], None]]:
    """Gives the function that is told the counts of a finished part; `done` are those that were there before."""
    before = [*done]
    tally = Tally(parts, len(before), sum(tokens_of(one) for one in before), limit)
    if before:
        print(f"{folder}: {len(before)} of {parts} parts are there already", file=sys.stderr)
    rich = None
    if sys.stderr.isatty():
        with suppress(MissingExtra):
            rich = require("rich.progress", "cli")
    if rich is None:
        yield tally.lines
        return
    console = require("rich.console", "cli").Console(stderr=True)
    columns = (
        rich.TextColumn("tokenizing {task.completed}/{task.total} parts"),
        rich.BarColumn(),
        rich.TextColumn("{task.fields[rate]}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=parts, completed=len(before), rate="")

        def show(counts: Mapping[str, Mapping[str, int]]) -> None:
            tally.add(counts)
            bar.update(task, completed=tally.finished, rate=tally.rate())

        yield show


class Tally:
    """Parts and tokens so far."""

    def __init__(self, parts: int, finished: int, tokens: int, limit: int | None) -> None:
        self.parts, self.finished, self.tokens, self.limit = parts, finished, tokens, limit
        self.began = self.shown = time.monotonic()
        self.new = 0

    def add(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        self.finished += 1
        self.new += tokens_of(counts)

    def rate(self) -> str:
        goal = "" if self.limit is None else f" of {self.limit:,}"
        return f"{self.tokens + self.new:,}{goal} tokens, {self.new / (time.monotonic() - self.began):,.0f}/s"

    def lines(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        self.add(counts)
        now = time.monotonic()
        if now - self.shown >= SECONDS_BETWEEN_LINES or self.finished == self.parts:
            self.shown = now
            print(f"tokenized {self.finished}/{self.parts} parts: {self.rate()}", file=sys.stderr, flush=True)


def tokens_of(counts: Mapping[str, Mapping[str, int]]) -> int:
    return counts[TRAIN]["tokens"]
