"""Protocols: how large the models are, which settings of the tasks are run, and how each is trained."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from femixer.tasks.mad.data import TASKS


@dataclass(frozen=True)
class Plan:
    """How the settings of one task are trained."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, where they differ from its defaults."""
    batch: int = 128
    steps: int | None = None
    """None: as many as the protocol's epochs."""
    learning_rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decays: tuple[float, ...] = (0.0, 0.1)


@dataclass(frozen=True)
class Protocol:
    """Sizes as in FEMConfig; AdamW at a constant rate, every pair of learning rate and weight decay."""

    name: str
    width: int = 128
    heads: int = 16
    layers: int = 2
    inner: int = 352
    """Width of SwiGLU."""
    sweeps: bool = False
    """All settings of a task, one variable at a time, instead of its defaults alone."""
    epochs: int = 200
    evaluations: int = 200
    """During training, at equal distances, besides the one before it."""
    validation: int = 1280
    """Sequences of our own validation split."""
    test: int = 1280
    resumable: bool = True
    """Save a checkpoint with every evaluation. Not worth it for jobs of a minute: those start over."""
    precision: Literal["no", "bf16"] = "no"
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """By task; a task without one is trained by `Plan()`."""

    def sizes(self) -> dict[str, int]:
        """As fields of FEMConfig."""
        return {
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.inner,
        }

    def plan(self, task: str) -> Plan:
        return self.plans.get(task, Plan())

    def settings(self, task: str) -> list[dict[str, Any]]:
        """All parameters of the task, for each setting."""
        chosen = self.plan(task).parameters
        settings = TASKS[task].settings() if self.sweeps else [dict(TASKS[task].defaults)]
        return [{**setting, **chosen} for setting in settings]

    def steps(self, task: str, parameters: Mapping[str, Any]) -> int:
        plan = self.plan(task)
        return plan.steps or self.epochs * math.ceil(parameters["train"] / plan.batch)


SMALL_TASKS: dict[str, dict[str, Any]] = {
    "compression": {"vocabulary": 12, "length": 16},
    "fuzzy-recall": {"vocabulary": 12, "length": 32, "motif": 2},
    "recall": {"length": 32},
    "memorization": {"vocabulary": 1024},
    "noisy-recall": {"vocabulary": 24, "length": 32},
    "selective-copying": {"length": 32, "copies": 8},
}
"""What the small protocols change of the tasks."""
SMALL: dict[str, Any] = {"width": 64, "heads": 8, "inner": 176, "validation": 256, "test": 512, "resumable": False}


def small(steps: Sequence[int], rates: Sequence[tuple[float, ...]], train: int) -> dict[str, Plan]:
    """Steps and learning rates of each of SMALL_TASKS; all but memorization have so many training sequences."""
    found = {}
    for (task, own), count, tried in zip(SMALL_TASKS.items(), steps, rates, strict=True):
        parameters = own if task == "memorization" else {**own, "train": train}
        found[task] = Plan(parameters, 32, count, tried, (0.0,))
    return found


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "lite",
            **SMALL,
            evaluations=5,
            plans=small((700, 900, 800, 200, 800, 500), [(2e-3,), *[(4e-3,)] * 5], train=6400),
        ),
        Protocol(
            "small",
            **SMALL,
            evaluations=20,
            plans=small((2000, 4000, 2000, 400, 2000, 1500), [(1e-3, 2e-3, 4e-3)] * 6, train=12800),
        ),
        Protocol("baseline"),
        Protocol("full", sweeps=True),
    )
}
"""By name. `baseline` and `full` are the original's: its six default settings, and its 66 settings."""
