"""`femixer eval`: lm-evaluation-harness on a checkpoint, task by task.

The results folder:

config.json     which model (a fingerprint of its files) and which settings
metrics.jsonl   one line per finished task: what --resume does not repeat
results.json    metrics, standard errors and shots of every task and group
table.md        the same to read; written last
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from femixer.damage import check_fields, check_numbers
from femixer.options import Count, Whole, check, model_first, parse, positional
from femixer.reporting import Column, Table, as_markdown
from femixer.tasks.lm import harness
from femixer.tasks.lm.harness import SUITES, Catalog, Record, Request, metrics
from femixer.tasks.lm.model import Placement, check_positions, fingerprint, load
from femixer.training import Results, RunOptions, atomic, show_table
from femixer.training.distributed import Interrupted, say
from femixer.training.results import METRICS, hold, model_folder, name_of


class TaskJournal:
    """One line per finished task in a results folder: read when opened, and written as they finish.

    A record is what `femixer.tasks.lm.harness.evaluate` returns, with the task's name and for which request.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.parameters: int | None = None
        self.records: list[Record] = []
        path = results.folder / METRICS
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    self.records.append(check_fields(json.loads(line), RECORD, path))
            # A line cut short by a crash must not swallow the next one.
            atomic.write(path, "".join(json.dumps(record) + "\n" for record in self.records))
        if self.records:
            self.parameters = self.records[0]["parameters"]

    def requests(self) -> dict[str, Request]:
        """Everything that was ever asked for, by name; the last one where a task was asked for with other shots."""
        return {record["request"]: Request(record["request"], record["asked_shots"]) for record in self.records}

    def of(self, request: Request) -> dict[str, Record]:
        """Task -> its record within a request; the group itself is there by the name of the request."""
        asked = (request.name, request.shots)
        return {one["task"]: one for one in self.records if (one["request"], one["asked_shots"]) == asked}

    def add(self, request: Request, task: str, record: Record) -> Record:
        # The error of a single sample is not a number.
        raw = {name: None if "_stderr" in name and value != value else value for name, value in record["raw"].items()}
        key = {"request": request.name, "asked_shots": request.shots, "task": task}
        line = {**key, "parameters": self.parameters, **record, "raw": raw}
        line = json.loads(json.dumps(line, default=float))  # numpy's numbers become plain ones
        values = {name: one["value"] for name, one in metrics(line).items()}
        check_numbers(values, f"{task} of {self.results.folder}")
        self.results.append([line])
        self.records.append(line)
        return line


RECORD = {
    **dict.fromkeys(("request", "task"), str),
    **dict.fromkeys(("parameters", "samples"), int),
    **dict.fromkeys(("asked_shots", "shots"), (int, None)),
    **dict.fromkeys(("raw", "higher_is_better"), dict),
}


RESULTS = "results.json"


@dataclass(frozen=True)
class Settings:
    """Everything besides the task that decides the numbers."""

    model: str
    fingerprint: str
    dtype: str
    max_length: int | None
    limit: float | None


def save(checkpoint: Path, settings: Settings, requests: Sequence[Request], journal: TaskJournal) -> Record:
    """Write results.json, and return what it holds: the finished `requests`, and what else the journal has."""
    asked = {request.name: request for request in requests}
    found = {}
    for name, request in {**asked, **journal.requests(), **asked}.items():
        records = journal.of(request)
        if name in records:
            found[name] = entry(records.pop(name))
            if records:
                found[name]["tasks"] = {task: entry(record) for task, record in records.items()}
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


def table(content: Record) -> Table:
    """Every metric of every task, with its standard error."""
    settings, lines = content["settings"], []
    tasks: list[tuple[str, Record]] = []
    for name, task in content["tasks"].items():
        tasks += [(name, task), *((f"– {member}", inner) for member, inner in task.get("tasks", {}).items())]
    for name, task in tasks:
        head = [name, "" if task["shots"] is None else str(task["shots"]), str(task["samples"])]
        for metric, cell in task["metrics"].items():
            direction = {True: " ↑", False: " ↓", None: ""}[cell["higher_is_better"]]
            stderr = "" if cell["stderr"] is None else f"{cell['stderr']:.4f}"
            lines.append([*head, metric + direction, shown(cell["value"]), stderr])
            head = ["", "", ""]
        if not task["metrics"]:
            lines.append([*head, "", "", ""])
    limit = "" if settings["limit"] is None else f" Only a part of each task (--limit {settings['limit']:g})."
    title = f"{settings['model']}: {content['parameters']:,} parameters, evaluated with lm-evaluation-harness.{limit}"
    return Table.of(["task", "shots", "samples", Column("metric"), "value", "standard error"], lines, title)


def summary(record: Record) -> str:
    return ", ".join(f"{name} {shown(cell['value'])}" for name, cell in metrics(record).items())


def shown(value: float) -> str:
    """An accuracy has four digits; the perplexity of an untrained model may be any number."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a trained model with lm-evaluation-harness.

    Each finished task is kept: after an interruption, or with more --tasks, --resume does only what is missing.
    """

    checkpoint: Annotated[Path, positional()]
    """Model folder, or results folder of `femixer lm train`."""
    placement: Placement
    tasks: tuple[str, ...] = ()
    """Tasks, groups and tags of the harness, or of --include-path. femixer_example needs no download."""
    suite: str | None = None
    """A set of tasks with their shots: paper (those of the paper's table)."""
    shots: Whole | None = None
    """Examples before the question, for all --tasks; by default each task's own number."""
    include_path: tuple[Path, ...] = ()
    """Folders with tasks of your own: YAML files, with their data beside them."""
    limit: float | None = None
    """Use only the first N samples of each task, or this fraction if below 1: for trying out, not for reporting."""
    batch_size: Count = 8
    """Sequences per forward pass."""
    max_length: int | None = None
    """Longest sequence in tokens; longer ones lose their beginning. By default the model's training context."""
    out: Path | None = None
    """Results folder. [default: results/eval-NAME, with the name of the checkpoint's folder]"""
    resume: bool = False
    """Keep finished tasks in the results folder and run the others."""
    overwrite: bool = False
    """Start anew; what is in the results folder is replaced when the new results are complete."""

    def validate(self) -> None:
        self.placement.validate()
        check(bool(self.tasks or self.suite), "tasks", self.tasks, "some --tasks or a --suite")
        check(self.suite is None or self.suite in SUITES, "suite", self.suite, f"one of {', '.join(SUITES)}")
        check(self.shots is None or bool(self.tasks), "shots", self.shots, "some --tasks: a suite has its own shots")
        check(self.max_length is None or self.max_length > 1, "max_length", self.max_length, "a whole number above 1")
        whole = self.limit is None or 0 < self.limit < 1 or (self.limit >= 1 and self.limit == int(self.limit))
        check(whole, "limit", self.limit, "a whole number above 0, or a share below 1")
        check(not (self.resume and self.overwrite), "resume", self.resume, "either --resume or --overwrite")

    def requested(self) -> dict[str, int | None]:
        """Task -> shots."""
        return {**dict.fromkeys(self.tasks, self.shots), **SUITES.get(self.suite or "", {})}


def main(args: Sequence[str]) -> int:
    command = parse(Evaluate, model_first(args), "eval")
    command.validate()
    folder = model_folder(command.checkpoint)
    catalog = Catalog(command.include_path, command.requested())
    requests = catalog.requests(command.requested())
    how = (command.placement.dtype, command.max_length, command.limit)
    settings = Settings(name_of(command.checkpoint), fingerprint(folder), *how)
    out = command.out or Path("results") / f"eval-{settings.model}"
    options = RunOptions(out, resume=command.resume, overwrite=command.overwrite)
    results = Results("eval", settings, options, others=(RESULTS,))
    journal = TaskJournal(results)
    failed = run(command, catalog, requests, journal, settings)
    results.finish(as_markdown(table(save(command.checkpoint, settings, requests, journal))))
    show_table(results)
    if failed:
        say(f"{len(failed)} of {len(requests)} failed ({', '.join(failed)}); --resume tries them again")
    return 1 if failed else 0


def run(
    command: Evaluate, catalog: Catalog, requests: Sequence[Request], journal: TaskJournal, settings: Settings
) -> list[str]:
    """Evaluate what the journal does not have. Returns which requests failed: a task without its data or packages does
    not stop the others."""
    missing = [request for request in requests if request.name not in journal.of(request)]
    if not missing:
        return []
    hold(journal.results.run.out)  # a finished run may be asked for more
    model, tokenizer = load(command.checkpoint, command.placement)
    if command.max_length is not None:
        check_positions(model, command.max_length, "max_length", command.max_length)
    lm = harness.language_model(model, tokenizer, command.batch_size, command.max_length)
    journal.parameters = sum(parameter.numel() for parameter in model.parameters())
    failed = []
    for number, request in enumerate(missing, start=1):
        say(f"[{number}/{len(missing)}] {request.name}")
        try:
            with contextlib.redirect_stdout(sys.stderr), harness.bars(sys.stderr.isatty()):
                evaluate(lm, catalog, request, journal, command.limit)
        except KeyboardInterrupt:
            finished = sum(other.name in journal.of(other) for other in requests)
            raise Interrupted(f"stopped with {finished} of {len(requests)} finished, which are kept") from None
        except FloatingPointError:
            raise  # of the model, and no fault of the task
        except Exception as error:
            if sys.flags.dev_mode:
                raise
            failed.append(request.name)
            reason, *_ = [*str(error).strip().splitlines(), ""]
            say(f"    failed: {type(error).__name__}: {reason}")
        save(command.checkpoint, settings, requests, journal)
    return failed


def evaluate(lm: Any, catalog: Catalog, request: Request, journal: TaskJournal, limit: float | None) -> None:
    """Evaluate the tasks of a request, each kept as it finishes, and then the group that they form."""
    tasks, group = catalog.load(request)
    for name, task in tasks.items():
        if name not in journal.of(request):
            began = time.monotonic()
            record = journal.add(request, name, harness.evaluate(lm, name, task, limit))
            say(f"    {name}: {summary(record)} ({record['samples']} samples, {time.monotonic() - began:.1f} s)")
    if group is not None:
        found = journal.of(request)
        record = journal.add(request, request.name, harness.aggregate(group, {name: found[name] for name in tasks}))
        say(f"    {request.name}: {summary(record)}")
