"""What an evaluation found: results.json, and a table to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from femixer.evaluation.harness import Record, metrics
from femixer.evaluation.journal import Journal
from femixer.evaluation.tasks import Request
from femixer.training import atomic

RESULTS = "results.json"


@dataclass(frozen=True)
class Settings:
    """Everything besides the task that decides the numbers."""

    model: str
    fingerprint: str
    dtype: str
    max_length: int | None
    limit: float | None


def save(checkpoint: Path, settings: Settings, requests: Sequence[Request], journal: Journal) -> Record:
    """Write results.json, and return what it holds: the finished `requests`, and what else the journal has."""
    asked = {request.name: request for request in requests}
    others = [request for request in journal.requests().values() if request.name not in asked]
    found = {}
    for request in [*requests, *others]:
        record = journal.find(request, request.name)
        if record is not None:
            found[request.name] = entry(record)
            members = [other for other in journal.records if _member(other, request)]
            if members:
                found[request.name]["tasks"] = {member["task"]: entry(member) for member in members}
    content = {
        "checkpoint": str(checkpoint),
        "parameters": journal.parameters,
        "settings": asdict(settings),
        "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch")},
        "tasks": found,
    }
    atomic.write(journal.results.folder / RESULTS, json.dumps(content, indent=2) + "\n")
    return content


def entry(record: Record) -> Record:
    return {name: record[name] for name in ("shots", "samples", "version")} | {"metrics": metrics(record)}


def table(content: Record) -> str:
    """Every metric of every task, with its standard error, in Markdown."""
    settings = content["settings"]
    limit = "" if settings["limit"] is None else f" Only a part of each task (--limit {settings['limit']:g})."
    lines = [
        f"{settings['model']}: {content['parameters']:,} parameters, evaluated with lm-evaluation-harness.{limit}",
        "",
        "| task | shots | samples | metric | value | standard error |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for name, task, depth in rows(content["tasks"]):
        head = [
            ("– " if depth else "") + name,
            "" if task["shots"] is None else str(task["shots"]),
            str(task["samples"]),
        ]
        for metric, cell in task["metrics"].items():
            direction = {True: " ↑", False: " ↓", None: ""}[cell["higher_is_better"]]
            stderr = "" if cell["stderr"] is None else f"{cell['stderr']:.4f}"
            lines.append(f"| {' | '.join([*head, metric + direction, shown(cell['value']), stderr])} |")
            head = ["", "", ""]
        if not task["metrics"]:
            lines.append(f"| {' | '.join([*head, '', '', ''])} |")
    return "\n".join(lines) + "\n"


def rows(tasks: dict[str, Record]) -> Iterator[tuple[str, Record, int]]:
    for name, task in tasks.items():
        yield name, task, 0
        for member, inner in task.get("tasks", {}).items():
            yield member, inner, 1


def summary(record: Record) -> str:
    return ", ".join(f"{name} {shown(cell['value'])}" for name, cell in metrics(record).items())


def shown(value: float) -> str:
    """An accuracy has four digits; the perplexity of an untrained model may be any number."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def _member(record: Record, request: Request) -> bool:
    same = record["request"] == request.name and record["asked_shots"] == request.shots
    return same and record["task"] != request.name
