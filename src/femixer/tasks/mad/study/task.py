"""`femixer mad study run`: variants x tasks x seeds, as jobs of a store."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from femixer.options import check
from femixer.reporting import Table
from femixer.tasks.mad.data.generators import IGNORE
from femixer.tasks.mad.fit import Examples, MadJob, summed_cross_entropy
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.mad.study.table import TASKS, learned, tabulate
from femixer.tasks.mad.study.variants import VARIANTS, Variant, begin, optimizer_of
from femixer.tasks.runner import Run
from femixer.training import Results, derive
from femixer.training.jobs import Jobs
from femixer.training.results import Record

ENOUGH = 0.95
"""Training ends after two evaluations in a row with a larger accuracy."""


@dataclass(frozen=True)
class StudyJob(MadJob):
    """One variant on one task, with one seed; its accuracy is per scored token, on the validation split."""

    variant: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.model} {self.task} lr {self.lr:g} seed {self.seed}"

    def summary(self, record: Record) -> str:
        when, last = learned(record), record["evaluations"][-1]
        told = "has not learned" if when is None else f"has learned at step {when}"
        return f"{told}; accuracy {last['validation']['accuracy']:.3f} at step {last['step']}"

    @property
    def splits(self) -> tuple[str, ...]:
        return ("validation",)

    def built(self) -> nn.Module:
        model = super().built()
        with torch.random.fork_rng():
            torch.manual_seed(derive(self.seed, "study"))
            begin(model, Variant(**self.variant))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model, Variant(**self.variant), self.lr, self.weight_decay)

    def score(self, model: Callable[..., Any], examples: Examples) -> dict[str, float]:
        logits, targets = model(examples.inputs, use_cache=False).logits, examples.targets
        scored = targets != IGNORE
        hits, count = float((logits.argmax(-1) == targets)[scored].sum()), int(scored.sum())
        return {"accuracy": hits / count, "loss": float(summed_cross_entropy(logits, targets)) / count}

    def ended(self, records: Sequence[Record], results: Results) -> bool:
        accuracies = [record["accuracy"] for record in results.metrics() if record.get("split") == "validation"]
        return len(accuracies) > 1 and min(accuracies[-2:]) > ENOUGH

    def record(self, metrics: Sequence[Record], diverged: str | None, parameters: int, device: torch.device) -> Record:
        return {**super().record(metrics, diverged, parameters, device), "variant": dict(self.variant)}


@dataclass(frozen=True)
class Experiment:
    """What is run."""

    variants: tuple[str, ...] = tuple(VARIANTS)
    """Variants by name, run in this order."""
    tasks: tuple[str, ...] = TASKS
    """Tasks, in the setting of the protocol lite."""
    seeds: int = 5
    """Runs of everything, with seeds that go up from --seed: other data, other starting weights."""
    seed: int = 0
    """The first seed."""
    lr: float = 2e-3
    """Learning rate."""
    steps: int = 4000
    """Training steps, unless it has learned before: two evaluations in a row above 0.95."""
    evaluate_every: int = 100
    """Steps between two evaluations."""

    def jobs(self) -> list[StudyJob]:
        """Variant by variant, all seeds of one before the next; a ValueError if one is not possible."""
        for name, known in (("variants", VARIANTS), ("tasks", TASKS)):
            asked, allowed = getattr(self, name), f"different ones of {', '.join(known)}"
            check(0 < len(asked) == len({*asked}), name, asked, allowed)
            for one in asked:
                check(one in known, name, one, allowed)
        for name in ("seeds", "steps", "evaluate_every"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a whole number above 0")
        check(self.seed >= 0, "seed", self.seed, "a whole number of at least 0")
        check(0 < self.lr < math.inf, "lr", self.lr, "a number above 0")
        return [
            self.job(name, task, self.seed + number)
            for name in self.variants
            for task in self.tasks
            for number in range(self.seeds)
        ]

    def job(self, name: str, task: str, seed: int) -> StudyJob:
        protocol, variant = PROTOCOLS["lite"], VARIANTS[name]
        (parameters,) = protocol.settings(task)
        sizes = {"vocab_size": parameters["vocabulary"], "max_position_embeddings": parameters["length"]}
        return StudyJob(
            model=name,
            task=task,
            parameters=parameters,
            protocol="study",
            seed=seed,
            lr=self.lr,
            weight_decay=0.0,
            fields={**protocol.sizes(), **variant.fields(), **sizes},
            batch=protocol.plan(task).batch,
            steps=self.steps,
            evaluate_every=self.evaluate_every,
            validation=protocol.validation,
            test=protocol.test,
            gates="torch" if variant.maps == "torch" else "own",
            variant=asdict(variant),
        )


@dataclass(frozen=True)
class StudyRun(Run):
    """Train variants of the mixer until they have learned a task, or for 4,000 steps.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/mad-study")))

    def jobs(self) -> list[StudyJob]:
        return self.experiment.jobs()

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records)
