"""The six tasks: their parameters, how MAD varies them, and their data, drawn anew and the same every time."""

import hashlib
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from femixer.options import check
from femixer.tasks.mad.data.generators import (
    Draw,
    Pair,
    compression,
    fuzzy_recall,
    memorization,
    recall,
    selective_copying,
)

Parameters = dict[str, Any]


@dataclass(frozen=True)
class MadTask:
    """What there is to know of a task besides its data."""

    name: str
    title: str
    """As in the paper's table."""
    generate: Callable[..., Pair]
    """(draw, **parameters) -> inputs and targets; it checks the parameters, and has all of them but `train`."""
    defaults: Mapping[str, Any]
    """vocabulary: the number of tokens, special ones and noise included; length; train: the number of training
    sequences; and what only this task has."""
    sweeps: Mapping[str, tuple[Any, ...]]
    """The values of a parameter besides its default; they are varied one at a time."""
    answers: Callable[[Mapping[str, Any]], int]
    """Parameters -> how many tokens can be the answer, where it is not the same in all sequences."""
    last_position_only: bool = False
    """All targets are decoded from the model's last position."""

    def settings(self) -> list[Parameters]:
        """All parameters of each setting: the baseline, then the sweeps."""
        varied = [{**self.defaults, name: value} for name, values in self.sweeps.items() for value in values]
        return [{**self.defaults}, *varied]

    def chance(self, **parameters: Any) -> float:
        """Accuracy, macro-averaged over tokens, of guessing blindly among the tokens that can be the answer."""
        answers = self.answers({**self.defaults, **parameters})
        # Compression also scores the token that ends every sequence, which nobody gets wrong.
        return 2 / (answers + 1) if self.last_position_only else 1 / answers


def upper_half(tokens: int) -> int:
    """Tokens 0, 1, ... are split into keys and values; values are one more where the number is odd."""
    return tokens - tokens // 2


SEQUENCES = (6400, 3200, 1600, 800)

TASKS = {
    task.name: task
    for task in (
        MadTask(
            "compression",
            "Compress",
            compression,
            {"vocabulary": 16, "length": 32, "train": 12800},
            {"vocabulary": (32, 64, 128), "length": (64, 128, 256), "train": SEQUENCES},
            lambda given: given["vocabulary"] - 1,
            last_position_only=True,
        ),
        MadTask(
            "fuzzy-recall",
            "Fuzzy Recall",
            fuzzy_recall,
            {"vocabulary": 16, "length": 128, "train": 12800, "motif": 3},
            {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train": SEQUENCES},
            lambda given: upper_half(given["vocabulary"] - 1),
        ),
        MadTask(
            "recall",
            "In-Ctx Recall",
            recall,
            {"vocabulary": 16, "length": 128, "train": 12800, "single_query": False},
            {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train": SEQUENCES},
            lambda given: upper_half(given["vocabulary"] - given["single_query"]),
        ),
        MadTask(
            "memorization",
            "Memorize TrainSet",
            memorization,
            {"vocabulary": 256, "length": 32, "train": 256},
            {"vocabulary": (512, 1024, 2048, 4096, 8192)},
            lambda given: upper_half(given["vocabulary"] - 1),
        ),
        MadTask(
            "noisy-recall",
            "Noisy Recall",
            recall,
            {
                "vocabulary": 32,
                "length": 128,
                "train": 12800,
                "single_query": False,
                "noise": 0.2,
                "noise_vocabulary": 16,
            },
            {"vocabulary": (48, 80, 144), "length": (256, 512, 1024), "train": SEQUENCES, "noise": (0.4, 0.6, 0.8)},
            lambda given: upper_half(given["vocabulary"] - given["noise_vocabulary"] - given["single_query"]),
        ),
        MadTask(
            "selective-copying",
            "Selective Copy",
            selective_copying,
            {"vocabulary": 16, "length": 256, "train": 12800, "copies": 16},
            {"vocabulary": (32, 64, 128), "length": (512, 1024), "train": SEQUENCES, "copies": (32, 64, 96)},
            lambda given: given["vocabulary"] - 2,
        ),
    )
}
"""By name, in the order of the paper's columns."""


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


def completed(task: MadTask, parameters: Parameters) -> Parameters:
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
