"""`femixer mad study table`: at which step each variant has learned."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.reporting import Column, Group, Score, Table
from femixer.tasks.mad.study.variants import VARIANTS
from femixer.tasks.runner import Tabulate
from femixer.training.jobs.store import as_text, distinct, same
from femixer.training.results import Record

TASKS = ("fuzzy-recall", "compression")
LEVEL = 0.9
"""A model has learned a task at the first evaluation with a larger accuracy."""


def curve(record: Record) -> Iterator[tuple[int, float]]:
    """Steps and accuracies."""
    for at in record["evaluations"]:
        yield at["step"], at["validation"]["accuracy"]


def learned(record: Record) -> int | None:
    """The step of the first evaluation above LEVEL, if there is one."""
    return next((step for step, accuracy in curve(record) if accuracy > LEVEL), None)


def average(record: Record) -> float:
    """The mean accuracy over all steps; that of the last evaluation stands for those that were not needed."""
    points = [*curve(record)]
    last = (record["steps"], points[-1][1])
    pairs = zip(points, [*points[1:], last], strict=True)
    area = sum((after - before) * (a + b) / 2 for (before, a), (after, b) in pairs)
    return area / record["steps"]


def tabulate(records: Sequence[Record]) -> list[Table]:
    """A table per task: variants in the order of VARIANTS."""
    same(
        records,
        "ways of training",
        lambda record: as_text([record["lr"], record["steps"], record["parameters"]]),
        "task",
    )
    same(records, "variants of one name", lambda record: as_text(record["variant"]), "model")
    records = distinct(records, lambda record: as_text(record["evaluations"]), ("model", "task", "seed"))
    return [table(task, of_task) for task in TASKS if (of_task := [r for r in records if r["task"] == task])]


def training(record: Record) -> str:
    """What variants that are compared must agree in."""
    return as_text([record["lr"], record["steps"], record["parameters"], record["training"]["evaluate_every"]])


def table(task: str, records: Sequence[Record]) -> Table:
    steps, seeds = records[0]["steps"], sorted({record["seed"] for record in records})
    rows = []
    for name in [*VARIANTS, *dict.fromkeys(r["model"] for r in records if r["model"] not in VARIANTS)]:
        own = sorted((record for record in records if record["model"] == name), key=lambda record: record["seed"])
        if own:
            when = [learned(record) for record in own]
            each = ", ".join(f"> {steps}" if step is None else str(step) for step in when)
            middle = sorted(math.inf if step is None else step for step in when)[len(when) // 2]
            shown = f"> {steps}" if middle == math.inf else f"{middle:g}"
            scores = Score({record["seed"]: average(record) for record in own}, len(seeds))
            rows.append([name, shown, each, scores.cell(1, 100), str(own[0]["parameter_count"])])
    every, lr, numbers = records[0]["training"]["evaluate_every"], records[0]["lr"], ", ".join(map(str, seeds))
    title = (
        f"{task}: step of the first evaluation (one every {every} steps) with more than {LEVEL:.0%} of the scored "
        f"tokens right; lr {lr:g}, seeds {numbers}."
    )
    heads = (
        Column("variant"),
        Column("median step", align="right"),
        Column("step of each seed"),
        Column("mean accuracy", key="average", scores=True),
        Column("parameters", align="right"),
    )
    note = (
        f"Mean accuracy: in percent, over all {steps} steps (a job that has learned keeps its last); ± standard error."
    )
    return Table(heads, [Group(rows)], title=title, notes=[note])


@dataclass(frozen=True)
class StudyTabulate(Tabulate):
    """When each variant has learned, over seeds. Writes table.md, which it prints, table.tex and table.csv."""

    results: tuple[Path, ...]
    """Stores of `femixer mad study run`, or files of `femixer mad study export`."""
    out: Path = Path("results/mad-study-table")
    """Folder of the files."""

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records)
