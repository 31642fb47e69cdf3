"""The six tasks: their parameters, and how MAD varies them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from femixer.tasks.mad.compression import compression
from femixer.tasks.mad.draw import Pair
from femixer.tasks.mad.fuzzy_recall import fuzzy_recall
from femixer.tasks.mad.memorization import memorization
from femixer.tasks.mad.recall import recall
from femixer.tasks.mad.selective_copying import selective_copying

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Task:
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
        Task(
            "compression",
            "Compress",
            compression,
            {"vocabulary": 16, "length": 32, "train": 12800},
            {"vocabulary": (32, 64, 128), "length": (64, 128, 256), "train": SEQUENCES},
            lambda given: given["vocabulary"] - 1,
            last_position_only=True,
        ),
        Task(
            "fuzzy-recall",
            "Fuzzy Recall",
            fuzzy_recall,
            {"vocabulary": 16, "length": 128, "train": 12800, "motif": 3},
            {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train": SEQUENCES},
            lambda given: upper_half(given["vocabulary"] - 1),
        ),
        Task(
            "recall",
            "In-Ctx Recall",
            recall,
            {"vocabulary": 16, "length": 128, "train": 12800, "single_query": False},
            {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train": SEQUENCES},
            lambda given: upper_half(given["vocabulary"] - given["single_query"]),
        ),
        Task(
            "memorization",
            "Memorize TrainSet",
            memorization,
            {"vocabulary": 256, "length": 32, "train": 256},
            {"vocabulary": (512, 1024, 2048, 4096, 8192)},
            lambda given: upper_half(given["vocabulary"] - 1),
        ),
        Task(
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
            {
                "vocabulary": (48, 80, 144),
                "length": (256, 512, 1024),
                "train": SEQUENCES,
                "noise": (0.4, 0.6, 0.8),
            },
            lambda given: upper_half(given["vocabulary"] - given["noise_vocabulary"] - given["single_query"]),
        ),
        Task(
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
