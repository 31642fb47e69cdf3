"""Data of a task, drawn anew whenever it is asked for and the same every time."""

import hashlib
import json
import operator
from typing import Any

import numpy as np

from femixer.options import check
from femixer.tasks.mad.draw import Draw, Pair
from femixer.tasks.mad.task import TASKS, Parameters, Task

SPLITS = ("train", "validation", "test")
BLOCK = 1024
"""Sequences drawn at a time, each block with random numbers of its own: it bounds the memory of what is in between."""


def sample(task: str, n: int, split: str = "train", seed: int = 0, **parameters: Any) -> Pair:
    """n sequences of a task: inputs and targets, int64 [n, T] each, targets IGNORE where nothing is scored.

    `parameters` are those of `TASKS[task].defaults`. The random numbers are decided by task, split, seed and all
    parameters. The test split is the original's; validation is drawn in the same way and is ours.
    """
    check(task in TASKS, "task", task, f"one of {', '.join(TASKS)}")
    check(split in SPLITS, "split", split, f"one of {', '.join(SPLITS)}")
    n, seed = whole("n", n), whole("seed", seed)
    complete = completed(TASKS[task], parameters)
    identity = json.dumps([task, split, seed, complete], sort_keys=True)
    entropy = int.from_bytes(hashlib.sha256(identity.encode()).digest(), "little")
    given = {name: value for name, value in complete.items() if name != "train"}
    blocks = []
    for start in range(0, max(n, 1), BLOCK):
        draw = Draw(min(BLOCK, n - start), split == "train", seed, np.random.default_rng([entropy, start]))
        blocks.append(TASKS[task].generate(draw, **given))
    inputs, targets = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return inputs, targets


def completed(task: Task, parameters: Parameters) -> Parameters:
    """All parameters of the task, each of the type that its default has."""
    for name in parameters:
        check(name in task.defaults, "parameter", name, f"one of {', '.join(task.defaults)} for task={task.name!r}")
    complete: Parameters = {}
    for name, default in task.defaults.items():
        value = parameters.get(name, default)
        if isinstance(default, bool):
            check(isinstance(value, bool), name, value, "True or False")
        elif isinstance(default, int):
            value = whole(name, value)
        else:
            check(isinstance(value, float | int), name, value, "a number")
            value = float(value)
        complete[name] = value
    check(complete["train"] > 0, "train", complete["train"], "a whole number above 0")
    return complete


def whole(name: str, value: Any) -> int:
    """The value as an int, whatever kind of integer it is; it must not be negative."""
    fits = hasattr(value, "__index__") and not isinstance(value, bool) and value >= 0
    check(fits, name, value, "a whole number of 0 or more")
    return operator.index(value)
