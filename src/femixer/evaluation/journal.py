"""The finished tasks of an evaluation, kept as they finish."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from femixer.evaluation.harness import Record
from femixer.evaluation.tasks import Request
from femixer.training import Results, atomic
from femixer.training.results import METRICS


class Journal:
    """One line per finished task in a results folder: read when opened, and written as they finish.

    A record is what `femixer.evaluation.harness.evaluate` returns, with the task's name and for which request.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.parameters: int | None = None
        self.records = list(_lines(results.folder / METRICS))
        if self.records:
            self.parameters = self.records[0]["parameters"]
        # A line cut short by a crash must not swallow the next one.
        if (results.folder / METRICS).exists():
            atomic.write(results.folder / METRICS, "".join(json.dumps(record) + "\n" for record in self.records))

    def requests(self) -> dict[str, Request]:
        """Everything that was ever asked for, by name; the last one where a task was asked for with other shots."""
        return {record["request"]: Request(record["request"], record["asked_shots"]) for record in self.records}

    def find(self, request: Request, task: str) -> Record | None:
        """The record of `task` within a request, or of the group itself if that is its name."""
        key = {"request": request.name, "asked_shots": request.shots, "task": task}
        return next((record for record in self.records if all(record[name] == key[name] for name in key)), None)

    def add(self, request: Request, task: str, record: Record) -> Record:
        key = {"request": request.name, "asked_shots": request.shots, "task": task}
        line = {**key, "parameters": self.parameters, **record}
        line = json.loads(json.dumps(line, default=float))  # numpy's numbers become plain ones
        self.results.append([line])
        self.records.append(line)
        return line


def _lines(path: Path) -> Iterator[Record]:
    """The lines of a JSON lines file, without one that was cut short."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)
