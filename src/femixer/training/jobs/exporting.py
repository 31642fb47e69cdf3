"""`femixer <command> export`: a store of results as one small file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.options import parse
from femixer.training.jobs.store import Kind, export, load


@dataclass(frozen=True)
class Command:
    """Write all records of one or more stores into one JSON file, which `table` reads like a store."""

    results: tuple[Path, ...]
    """Stores, or files that this command wrote."""
    out: Path
    """The file."""


def run(args: Sequence[str], kind: Kind) -> int:
    command = parse(Command, args, f"{kind.command} export")
    records = [record for path in command.results for record in load(path, kind)]
    export(records, command.out, kind)
    print(f"{len(records)} records are in {command.out}")
    return 0
