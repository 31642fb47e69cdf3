"""The results store: one JSON file per finished job.

store.json            the format of the store
jobs/NAME.json        the record of a finished job; NAME ends in a hash of everything that defines the job
errors/NAME.txt       why a job failed, until it succeeds
running/NAME/         the training run of a job that is not finished, NAME.log what it printed, NAME.lock who has it
running/NAME.again    the job is to be run again (--overwrite): its record is of before, and stays until then
runs/TITLE/           the results folder of a finished job, where the task keeps those
table.md              what the last command that ran all jobs showed, with figures where the task has some

Any number of processes may write to one store: a record appears at once and completely under its own name.
"""

import json
import os
import statistics
import uuid
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from femixer.damage import Damaged, Fields, check_fields, read_json
from femixer.options import check
from femixer.training import atomic
from femixer.training.results import CONFIG, STORE, TABLE, Record

INDEX, JOBS, ERRORS, RUNNING, RUNS = STORE, "jobs", "errors", "running", "runs"
RECORD = "record.json"
"""In the results folder of a single training: its record, as an exported file."""


@dataclass(frozen=True)
class Kind:
    """Of results: which command writes and reads them, and the version of what it writes."""

    command: str
    format: int | str
    """In stores and exported files. A change of the data, the models or the record makes it another."""
    record: Fields = field(default_factory=dict)
    """What a record must have, so that tables can be made of it."""
    run: str = "run"
    """What the command that makes such a store is called."""

    def checked(self, record: Any, where: Any) -> Record:
        """The record itself, or a ValueError that names the field."""
        return check_fields(record, self.record, where)


class Store:
    """A store that jobs are added to; a new folder becomes one."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder, self.kind = folder.resolve(), kind  # it travels to processes that are elsewhere
        check(not folder.exists() or folder.is_dir(), "out", str(folder), "a folder")
        if not (folder / INDEX).exists():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                atomic.check_free("out", folder, instead="a store of results, or ")
            except ValueError:
                if not (folder / INDEX).exists():  # another process may have made it a store just now
                    raise
            put(folder / INDEX, json.dumps({"format": kind.format}) + "\n")
        check_format(folder / INDEX, kind)

    def path(self, name: str) -> Path:
        """Of the record of a job."""
        return self.folder / JOBS / f"{name}.json"

    def again(self, name: str) -> Path:
        return self.folder / RUNNING / f"{name}.again"

    def finished(self, name: str) -> bool:
        return self.path(name).exists() and not self.again(name).exists()

    def add(self, name: str, record: Record) -> None:
        put(self.path(name), json.dumps(record) + "\n")
        for path in (self.again(name), self.folder / ERRORS / f"{name}.txt"):
            path.unlink(missing_ok=True)

    def record(self, name: str) -> Record:
        path = self.path(name)
        return self.kind.checked(read_json(path), path)

    def failed(self, name: str, error: str) -> None:
        put(self.folder / ERRORS / f"{name}.txt", error)

    def run_again(self, name: str) -> None:
        """The job is not finished any more; its record stays until there is another."""
        put(self.again(name), "")
        atomic.remove(self.folder / RUNNING / name)


def put(path: Path, text: str) -> None:
    """Write a file at once, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{atomic.PARTIAL}")
    try:
        partial.write_text(text, encoding="utf-8")
        atomic.commit(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], kind: Kind) -> list[Record]:
    """The records of a store (a folder), of one training's folder that holds its record, or of an exported file."""
    path = Path(path)
    made = f"femixer {kind.command}"
    allowed = f"a store of `{made} {kind.run}`, a finished run that keeps its {RECORD}, or a file of `{made} export`"
    if not (path / INDEX).exists() and (path / RECORD).exists():
        path = path / RECORD
    if path.is_dir():
        there = (path / INDEX).exists()
        check(there, "results", str(path), allowed, "" if there else no_store(path))
        check_format(path / INDEX, kind)
        return [kind.checked(read_json(file), file) for file in sorted((path / JOBS).glob("*.json"))]
    check(path.is_file(), "results", str(path), allowed, "does not exist")
    records = check_fields(check_format(path, kind), {"records": [dict]}, path)["records"]
    return [kind.checked(record, f"{path}, record {number}") for number, record in enumerate(records, start=1)]


def no_store(folder: Path) -> str:
    """What a folder is instead."""
    if not (folder / CONFIG).is_file():
        return "is a folder without results"
    config = read_json(folder / CONFIG)
    task = config.get("task") if isinstance(config, dict) else None
    if task is None:
        return "is a folder with a model, and not its results"
    return f"is {'a' if (folder / TABLE).exists() else 'an unfinished'} run of {task!r} without a {RECORD}"


def export(records: Iterable[Record], path: Path, kind: Kind) -> None:
    """One file, a record per line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, f'{{"format": {json.dumps(kind.format)}, "records": [\n{lines}\n]}}\n')


def check_format(path: Path, kind: Kind) -> dict[str, Any]:
    """The content of store.json or of an exported file, which must be of this kind and version."""
    try:
        content = read_json(path)
        version = content["format"]
    except (OSError, Damaged, KeyError, TypeError):
        command = f"femixer {kind.command} {kind.run}"
        raise ValueError(f"{path} is not one of the results that `{command}` and `export` write") from None
    if version != kind.format:
        told = "was written by another version of femixer, or by another command"
        formats = f"its format is {version!r} and here it is {kind.format!r}"
        raise ValueError(f"{path} {told}: {formats}; use that one, or run the jobs anew with another --out")
    return content


def same(records: Sequence[Record], what: str, value: Callable[[Record], Hashable], *within: str) -> None:
    """An error unless records that agree in the fields `within` have the same value."""
    held: dict[str, Record] = {}
    for record in records:
        first = held.setdefault(described(record, within), record)
        if value(first) != value(record):
            where = f" ({described(record, within)})" if within else ""
            two = f"{value(first)} and {value(record)}"
            raise ValueError(f"results mix different {what}{where}: {two}; choose --results that can be compared")


def described(record: Record, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {as_text(record[name])}" for name in names)


def distinct(
    records: Sequence[Record], result: Callable[[Record], Hashable], definition: Sequence[str]
) -> list[Record]:
    """Each job once, told by the fields of its `definition`; an error if one has two results, or versions differ."""
    same(records, "versions of femixer", lambda record: record["environment"]["femixer"])
    same(records, "results of one job", result, *definition)
    return [*{described(record, definition): record for record in records}.values()]


def setting(record: Record, tuned: Sequence[str]) -> tuple[float, ...]:
    """The options of training that were tuned."""
    return tuple(record["training"][name] for name in tuned)


def besides(record: Record, tuned: Sequence[str]) -> Record:
    """How it was trained, besides what was tuned."""
    return {name: value for name, value in record["training"].items() if name not in tuned}


def best(records: Sequence[Record], tuned: Sequence[str], error: Callable[[Record], float]) -> list[Record]:
    """Those of one setting: of the most seeds, and among these of the lowest mean error."""
    settings: dict[tuple[float, ...], list[Record]] = defaultdict(list)
    for record in records:
        settings[setting(record, tuned)].append(record)
    return min(settings.values(), key=lambda own: (-len(own), statistics.mean(map(error, own))))


def as_text(value: object) -> str:
    """To compare settings by."""
    return json.dumps(value, sort_keys=True)
