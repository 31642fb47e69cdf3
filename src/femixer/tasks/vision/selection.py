"""Which of the recorded numbers count, and where they stand: groups of pictures and sizes, and models in each.

A job is a model trained with one seed; its scores are those on the test part, of the best weights by validation. Where
jobs differ in learning rate or weight decay as well, the pair with the highest validation accuracy, as the mean over
seeds, counts; a pair that has fewer seeds than another does not.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from femixer.evaluation.cells import Cell
from femixer.options import check
from femixer.training.jobs.comparable import described, same
from femixer.training.results import Record

PAIR = ("lr", "weight_decay")


@dataclass(frozen=True)
class Group:
    """Results that may be compared."""

    dataset: str
    preset: str
    classes: int
    seeds: tuple[int, ...]
    chosen: dict[str, list[Record]]
    """model -> the records that count, one per seed."""

    def cell(self, model: str, metric: str) -> Cell:
        scores = {record["seed"]: record[metric] for record in self.chosen[model]}
        return Cell(scores, len(self.seeds), len(scores), len(self.seeds))


def groups(records: Sequence[Record]) -> list[Group]:
    """In the order of their first records."""
    held: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in comparable(records):
        held[record["dataset"], record["preset"]].append(record)
    return [group(*place, own) for place, own in held.items()]


def group(dataset: str, preset: str, records: Sequence[Record]) -> Group:
    models: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        models[record["model"]].append(record)
    seeds = tuple(sorted({record["seed"] for record in records}))
    chosen = {model: best_pair(own) for model, own in models.items()}
    return Group(dataset, preset, records[0]["classes"], seeds, chosen)


def best_pair(records: Sequence[Record]) -> list[Record]:
    pairs: dict[tuple[float, ...], list[Record]] = defaultdict(list)
    for record in records:
        pairs[pair(record)].append(record)
    return min(pairs.values(), key=lambda own: (-len(own), -statistics.mean(r["validation_top1"] for r in own)))


def pair(record: Record) -> tuple[float, ...]:
    return tuple(record["training"][name] for name in PAIR)


def comparable(records: Sequence[Record]) -> list[Record]:
    """The records, each job once; an error if they are not of one experiment."""
    check(len(records) > 0, "results", "without a finished job", "stores where `femixer vision run` has finished some")
    same(records, "versions of femixer", lambda record: record["environment"]["femixer"])
    same(records, "pictures of one name", lambda record: record["fingerprint"], "dataset")
    same(records, "ways of training", training, "dataset", "preset")
    same(
        records,
        "models of one name",
        lambda record: text([record["fields"], record["parameter_count"]]),
        "model",
        "dataset",
        "preset",
    )
    whole = ("model", "dataset", "preset", "seed", "training")
    same(records, "results of one job", lambda record: record["top1"], *whole)
    return [*{described(record, whole): record for record in records}.values()]


def training(record: Record) -> str:
    """How it was trained, besides the learning rate and weight decay, as text."""
    rest = {name: value for name, value in record["training"].items() if name not in PAIR}
    return text([rest, record["augmentation"], record["eval_crop"]])


def text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
