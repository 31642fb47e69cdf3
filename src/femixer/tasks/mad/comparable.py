"""Whether results may stand in one table: those of another protocol, version or way of training may not."""

from __future__ import annotations

import json
from collections.abc import Sequence

from femixer.options import check
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.training.jobs.comparable import described, same
from femixer.training.results import Record


def comparable(records: Sequence[Record]) -> list[Record]:
    """The records, each job once; an error if they are not of one experiment."""
    check(len(records) > 0, "results", "without a finished job", "stores where `femixer mad run` has finished some")
    same(records, "protocols", lambda record: record["protocol"])
    same(records, "versions of femixer", lambda record: record["environment"]["femixer"])
    protocol = PROTOCOLS.get(records[0]["protocol"].partition(" ")[0])
    if protocol is None or not protocol.sweeps:
        same(records, "settings of a task", setting, "task")
    same(records, "ways of training a task", training, "task", "parameters")
    same(records, "models of one name", fields, "model", "task", "parameters")
    whole = ("model", "task", "parameters", "lr", "weight_decay", "seed")
    same(records, "results of one job", lambda record: json.dumps(record["evaluations"]), *whole)
    return [*{described(record, whole): record for record in records}.values()]


def setting(record: Record) -> str:
    """All parameters of the task, as text."""
    return json.dumps(record["parameters"], sort_keys=True)


def training(record: Record) -> str:
    """How it was trained, besides the learning rate and weight decay, as text."""
    others = {name: value for name, value in record.get("training", {}).items() if name != "fields"}
    return json.dumps({"steps": record["steps"], **others}, sort_keys=True)


def fields(record: Record) -> str:
    """What the model was, as text."""
    return json.dumps(record.get("training", {}).get("fields"), sort_keys=True)
