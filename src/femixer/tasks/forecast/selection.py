"""Which of the recorded numbers count, and where they stand: groups of data set and look-back, horizons, models.

A job is a model trained on one data set, for one horizon and with one seed; its errors are those on the test split, of
the weights with the lowest validation MSE. Where jobs differ in what is TUNED as well, the setting with the lowest
validation MSE, as the mean over seeds, counts; one that has fewer seeds than another does not.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from femixer.evaluation.cells import Cell
from femixer.options import check
from femixer.tasks.forecast.known import LOOKBACKS
from femixer.training.jobs.comparable import described, same
from femixer.training.results import Record

METRICS = ("mse", "mae")
TUNED = ("lr", "weight_decay")
"""Options of training that validation chooses, for each model, data set and horizon."""


@dataclass(frozen=True)
class Group:
    """Results that a mean over horizons may be taken of."""

    dataset: str
    lookback: int | None
    """None: the protocol's, which goes with the horizon."""
    horizons: tuple[int, ...]
    seeds: tuple[int, ...]
    chosen: dict[tuple[str, int], list[Record]]
    """(model, horizon) -> the records that count, one per seed."""

    def cell(self, model: str, metric: str, *horizons: int) -> Cell:
        """The mean over the horizons, of the seeds that all of them have."""
        found = [{r["seed"]: r[metric] for r in self.chosen.get((model, horizon), ())} for horizon in horizons]
        shared = sorted(set.intersection(*({*scores} for scores in found)))
        means = {seed: statistics.mean(scores[seed] for scores in found) for seed in shared}
        return Cell(means, len(self.seeds), sum(map(len, found)), len(self.seeds) * len(horizons))


def groups(records: Sequence[Record], tuned: Sequence[str] = TUNED) -> list[Group]:
    """In the order of the data sets' first records, the protocol's look-backs first."""
    held: dict[tuple[str, int | None], list[Record]] = defaultdict(list)
    for record in comparable(records, tuned):
        held[record["dataset"], look(record)].append(record)
    order = [*dict.fromkeys(dataset for dataset, _ in held)]
    places = sorted(held, key=lambda place: (order.index(place[0]), place[1] is not None, -(place[1] or 0)))
    return [group(*place, held[place], tuned) for place in places]


def group(dataset: str, lookback: int | None, records: Sequence[Record], tuned: Sequence[str]) -> Group:
    of: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        of[record["model"], record["horizon"]].append(record)
    horizons, seeds = (tuple(sorted({record[name] for record in records})) for name in ("horizon", "seed"))
    return Group(dataset, lookback, horizons, seeds, {place: best(own, tuned) for place, own in of.items()})


def look(record: Record) -> int | None:
    return None if LOOKBACKS.get(record["horizon"]) == record["lookback"] else record["lookback"]


def best(records: Sequence[Record], tuned: Sequence[str]) -> list[Record]:
    settings: dict[tuple[float, ...], list[Record]] = defaultdict(list)
    for record in records:
        settings[setting(record, tuned)].append(record)
    return min(settings.values(), key=lambda own: (-len(own), statistics.mean(r["validation_mse"] for r in own)))


def setting(record: Record, tuned: Sequence[str]) -> tuple[float, ...]:
    return tuple(record["training"][name] for name in tuned)


def comparable(records: Sequence[Record], tuned: Sequence[str]) -> list[Record]:
    """The records, each job once; an error if they are not of one experiment."""
    check(
        len(records) > 0, "results", "without a finished job", "stores where `femixer forecast run` has finished some"
    )
    same(records, "versions of femixer", lambda record: record["environment"]["femixer"])
    same(records, "data of one name", lambda record: record["fingerprint"], "dataset")
    same(records, "ways of training", lambda record: training(record, tuned), "dataset", "lookback", "horizon")
    same(records, "models of one name", lambda record: json.dumps(record["fields"], sort_keys=True), "model", "dataset")
    whole = ("model", "dataset", "horizon", "lookback", "seed", "training")
    same(records, "results of one job", lambda record: record["mse"], *whole)
    return [*{described(record, whole): record for record in records}.values()]


def training(record: Record, tuned: Sequence[str]) -> str:
    """How it was trained, besides what is tuned, as text."""
    return json.dumps({name: value for name, value in record["training"].items() if name not in tuned}, sort_keys=True)
