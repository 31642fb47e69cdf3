"""MAD's score: which of the recorded numbers count.

A job is a model trained on one setting of a task, with one learning rate, weight decay and seed. Its accuracy is the
test accuracy at the evaluation of lowest loss on the selecting split. Among jobs that differ only in learning rate and
weight decay, the one of highest accuracy on the selecting split counts. A task's score is the mean over its settings,
and a model's the mean over the six tasks. The original selects on its test split; validation is a split of our own.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from femixer.evaluation.cells import Cell
from femixer.options import check
from femixer.tasks.mad.comparable import comparable, setting
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.mad.task import TASKS
from femixer.training.results import Record

SELECT = ("validation", "test")


Row = dict[str, Cell]
"""Task -> cell of one model, all six of them; scores are accuracies from 0 to 1."""


def rows(records: Sequence[Record], select: str = "validation") -> dict[str, Row]:
    """The scores of each model, in the order in which the models first appear."""
    check(select in SELECT, "select", select, f"one of {', '.join(SELECT)}")
    records = comparable(records)
    seeds = {record["seed"] for record in records}
    table: dict[str, Row] = {model: {} for model in dict.fromkeys(record["model"] for record in records)}
    for task in TASKS:
        of_task = [record for record in records if record["task"] == task]
        settings = {setting(record) for record in of_task} | planned(records[0]["protocol"], task)
        pairs = {pair(record) for record in of_task}
        for model, row in table.items():
            own = [record for record in of_task if record["model"] == model]
            row[task] = cell(own, seeds, settings, pairs, select)
    return table


def cell(
    records: Iterable[Record], seeds: Collection[int], settings: Collection[str], pairs: Collection[object], select: str
) -> Cell:
    """One model on one task; `settings` and `pairs` of learning rate and weight decay are what must be there."""
    found: dict[int, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[record["seed"]][setting(record)].append(record)
    finished = {seed: sum(map(len, jobs.values())) for seed, jobs in found.items()}
    each = len(settings) * len(pairs)
    scores = {
        seed: statistics.mean(accuracy(jobs, select) for jobs in found[seed].values())
        for seed in sorted(found)
        if finished[seed] == each
    }
    return Cell(scores, len(seeds), sum(finished.values()), each * len(seeds))


def average(row: Row) -> Cell:
    """Over the six tasks, of the seeds that all of them have."""
    cells = row.values()
    seeds = set.intersection(*({*cell.scores} for cell in cells))
    scores = {seed: statistics.mean(cell.scores[seed] for cell in cells) for seed in sorted(seeds)}
    return Cell(scores, max(cell.seeds for cell in cells))


def accuracy(jobs: Iterable[Record], select: str) -> float:
    """On the test split, of the best of jobs that differ only in learning rate and weight decay."""
    best = max((checkpoint(job, select) for job in jobs), key=lambda at: (at[select]["accuracy"], -loss(at, select)))
    return best["test"]["accuracy"]


def checkpoint(job: Record, select: str) -> Record:
    return min(job["evaluations"], key=lambda at: loss(at, select))


def loss(evaluation: Record, select: str) -> float:
    """Infinite where training had diverged: NaN is neither less nor more than any number."""
    value = evaluation[select]["loss"]
    return value if value is not None and math.isfinite(value) else math.inf


def pair(record: Record) -> tuple[float, float]:
    return record["lr"], record["weight_decay"]


def planned(protocol: str, task: str) -> set[str]:
    """The settings of a protocol that has many. One with a single setting per task has it in the results, if any."""
    known = PROTOCOLS.get(protocol)
    parameters = known.settings(task) if known is not None and known.sweeps else []
    return {json.dumps(each, sort_keys=True) for each in parameters}
