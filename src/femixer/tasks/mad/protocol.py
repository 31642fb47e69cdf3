"""Protocols: how large the models are, which settings of the tasks are run, and how each is trained."""

import math
from collections.abc import Mapping
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


def quick(steps: int, batch: int, *rates: float, **parameters: Any) -> Plan:
    return Plan(parameters, batch, steps, rates, (0.0,))


RATES = (1e-3, 2e-3, 4e-3)
SMALL: dict[str, Any] = {"width": 64, "heads": 8, "inner": 176, "validation": 256, "test": 512, "resumable": False}


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "lite",
            **SMALL,
            evaluations=5,
            plans={
                "compression": quick(700, 32, 2e-3, vocabulary=12, length=16, train=6400),
                "fuzzy-recall": quick(900, 32, 4e-3, vocabulary=12, length=32, motif=2, train=6400),
                "recall": quick(800, 32, 4e-3, length=32, train=6400),
                "memorization": quick(200, 32, 4e-3, vocabulary=1024),
                "noisy-recall": quick(800, 32, 4e-3, vocabulary=24, length=32, train=6400),
                "selective-copying": quick(500, 32, 4e-3, length=32, copies=8, train=6400),
            },
        ),
        Protocol(
            "small",
            **SMALL,
            evaluations=20,
            plans={
                "compression": quick(2000, 32, *RATES, vocabulary=12, length=16, train=12800),
                "fuzzy-recall": quick(4000, 32, *RATES, vocabulary=12, length=32, motif=2, train=12800),
                "recall": quick(2000, 32, *RATES, length=32, train=12800),
                "memorization": quick(400, 32, *RATES, vocabulary=1024),
                "noisy-recall": quick(2000, 32, *RATES, vocabulary=24, length=32, train=12800),
                "selective-copying": quick(1500, 32, *RATES, length=32, copies=8, train=12800),
            },
        ),
        Protocol("baseline"),
        Protocol("full", sweeps=True),
    )
}
"""By name. `baseline` and `full` are the original's: its six default settings, and its 66 settings."""
