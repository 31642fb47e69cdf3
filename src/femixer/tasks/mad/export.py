"""`femixer mad export`: a store of results as one small file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.options import parse
from femixer.tasks.mad import store


@dataclass(frozen=True)
class Command:
    """Write all records of one or more stores into one JSON file, which `femixer mad table` reads like a store."""

    results: tuple[Path, ...]
    """Stores, or files that this command wrote."""
    out: Path
    """The file."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "mad export")
    records = [record for path in command.results for record in store.load(path)]
    store.export(records, command.out)
    print(f"{len(records)} records are in {command.out}")
    return 0
