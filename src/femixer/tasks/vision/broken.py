"""The pictures that could not be read, collected over a run: a list in the results folder and a word at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from femixer.tasks.vision.source import Broken
from femixer.training import atomic, distributed

FILE = "broken.jsonl"


class Collected:
    """Of all processes; those of before an interruption stay."""

    def __init__(self, folder: Path, known: Iterable[Broken]) -> None:
        self.path = folder / FILE
        held = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.found = {broken.name: broken for broken in (*known, *(Broken(**json.loads(line)) for line in held))}
        self.written = len(held)

    def add(self, broken: Iterable[Broken]) -> None:
        for each in broken:
            self.found.setdefault(each.name, each)

    def write(self) -> int:
        """Called in all processes at once: put the list on the disk, if it has grown; how many there are."""
        for others in distributed.gather([*self.found.values()]):
            self.add(others)
        if distributed.is_main() and len(self.found) > self.written:
            for each in [*self.found.values()][self.written :]:
                print(f"skipped: {each.name}: {each.reason}", file=sys.stderr)
            lines = (json.dumps(vars(each)) + "\n" for each in self.found.values())
            atomic.write(self.path, "".join(lines))
        self.written = len(self.found)
        return self.written
