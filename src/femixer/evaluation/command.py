"""`femixer eval`: lm-evaluation-harness on a checkpoint, task by task.

The results folder:

config.json     which model (a fingerprint of its files) and which settings
metrics.jsonl   one line per finished task: what --resume does not repeat
results.json    metrics, standard errors and shots of every task and group
table.md        the same to read; written last
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from femixer.evaluation import harness
from femixer.evaluation.journal import Journal
from femixer.evaluation.report import Settings, save, summary, table
from femixer.evaluation.suite import SUITES
from femixer.evaluation.tasks import Catalog, Request
from femixer.optional import require
from femixer.options import check, parse
from femixer.tasks.lm.checkpoint import Placement, fingerprint, load, model_folder, name_of
from femixer.training import Results, RunOptions, atomic, show_table
from femixer.training.interrupt import Interrupted
from femixer.training.results import TABLE

tyro = require("tyro", "cli")


@dataclass(frozen=True)
class Command:
    """Evaluate a trained model with lm-evaluation-harness.

    Each finished task is kept: after an interruption, or with more --tasks, --resume does only what is missing.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Model folder, or results folder of `femixer lm train`."""
    placement: Placement
    tasks: tuple[str, ...] = ()
    """Tasks, groups and tags of the harness, or of --include-path. femixer_example needs no download."""
    suite: str | None = None
    """A set of tasks with their shots: paper (those of the paper's table)."""
    shots: int | None = None
    """Examples before the question, for all --tasks; by default each task's own number."""
    include_path: tuple[Path, ...] = ()
    """Folders with tasks of your own: YAML files, with their data beside them."""
    limit: float | None = None
    """Only the first so many samples of each task, or below 1 this share of them: to try, not to report."""
    batch_size: int = 8
    """Sequences per forward pass."""
    max_length: int | None = None
    """Longest sequence in tokens; longer ones lose their beginning. By default the model's training context."""
    out: Path | None = None
    """Results folder. [default: results/eval-NAME, with the name of the checkpoint's folder]"""
    resume: bool = False
    """Keep the finished tasks in the results folder and do the others."""
    overwrite: bool = False
    """Delete what is in the results folder and start anew."""

    def validate(self) -> None:
        self.placement.validate()
        check(bool(self.tasks or self.suite), "tasks", self.tasks, "some --tasks or a --suite")
        check(self.suite is None or self.suite in SUITES, "suite", self.suite, f"one of {', '.join(SUITES)}")
        check(self.shots is None or self.shots >= 0, "shots", self.shots, "a whole number of at least 0")
        check(self.shots is None or bool(self.tasks), "shots", self.shots, "some --tasks: a suite has its own shots")
        check(self.batch_size > 0, "batch_size", self.batch_size, "a whole number above 0")
        check(self.max_length is None or self.max_length > 1, "max_length", self.max_length, "a whole number above 1")
        whole = self.limit is None or 0 < self.limit < 1 or (self.limit >= 1 and self.limit == int(self.limit))
        check(whole, "limit", self.limit, "a whole number above 0, or a share below 1")
        check(not (self.resume and self.overwrite), "resume", self.resume, "either --resume or --overwrite")

    def requested(self) -> dict[str, int | None]:
        """Task -> shots."""
        return {**dict.fromkeys(self.tasks, self.shots), **SUITES.get(self.suite or "", {})}


class EvaluationInterrupted(Interrupted):
    """Ctrl-C between or during tasks."""

    def __init__(self, finished: int, total: int) -> None:
        KeyboardInterrupt.__init__(self, f"stopped with {finished} of {total} finished, which are kept")


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "eval")
    command.validate()
    folder = model_folder(command.checkpoint)
    catalog = Catalog(command.include_path, command.requested())
    requests = catalog.requests(command.requested())
    settings = Settings(
        name_of(command.checkpoint), fingerprint(folder), command.placement.dtype, command.max_length, command.limit
    )
    out = command.out or Path("results") / f"eval-{settings.model}"
    results = Results("eval", settings, RunOptions(out, resume=command.resume, overwrite=command.overwrite))
    journal = Journal(results)
    failed = run(command, catalog, requests, journal, settings)
    results.finish(table(save(command.checkpoint, settings, requests, journal)))
    show_table(results)
    print(f"Results are in {out}/")
    if failed:
        say(f"{len(failed)} of {len(requests)} failed ({', '.join(failed)}); --resume tries them again")
    return 1 if failed else 0


def run(
    command: Command, catalog: Catalog, requests: Sequence[Request], journal: Journal, settings: Settings
) -> list[str]:
    """Evaluate what the journal does not have. Returns which requests failed: a task without its data or packages does
    not stop the others."""
    missing = [request for request in requests if journal.find(request, request.name) is None]
    if not missing:
        return []
    atomic.remove(journal.results.folder / TABLE)
    model, tokenizer = load(command.checkpoint, command.placement)
    lm = harness.language_model(model, tokenizer, command.batch_size, command.max_length)
    journal.parameters = sum(parameter.numel() for parameter in model.parameters())
    failed = []
    for number, request in enumerate(missing, start=1):
        say(f"[{number}/{len(missing)}] {request.name}")
        try:
            with contextlib.redirect_stdout(sys.stderr), harness.bars(sys.stderr.isatty()):
                evaluate(lm, catalog, request, journal, command.limit)
        except KeyboardInterrupt:
            finished = sum(journal.find(other, other.name) is not None for other in requests)
            raise EvaluationInterrupted(finished, len(requests)) from None
        except Exception as error:
            if sys.flags.dev_mode:
                raise
            failed.append(request.name)
            reason, *_ = [*str(error).strip().splitlines(), ""]
            say(f"    failed: {type(error).__name__}: {reason}")
        save(command.checkpoint, settings, requests, journal)
    return failed


def evaluate(lm: Any, catalog: Catalog, request: Request, journal: Journal, limit: float | None) -> None:
    """Evaluate the tasks of a request, each kept as it finishes, and then the group that they form."""
    tasks, group = catalog.load(request)
    records = {}
    for name, task in tasks.items():
        record = journal.find(request, name)
        if record is None:
            began = time.monotonic()
            record = journal.add(request, name, harness.evaluate(lm, name, task, limit))
            say(f"    {name}: {summary(record)} ({record['samples']} samples, {time.monotonic() - began:.1f} s)")
        records[name] = record
    if group is not None:
        record = journal.add(request, request.name, harness.aggregate(group, records))
        say(f"    {request.name}: {summary(record)}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
