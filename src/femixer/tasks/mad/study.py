"""What decides how early a free energy mixer learns a task? `femixer mad study` trains variants of its start.

`run` is variants x tasks x seeds, as jobs of a store, `table` at which step each variant has learned. Every job is
trained until it has learned or for 4,000 steps, at the sizes and settings of the protocol `lite`, with one learning
rate. Variants of the same parts start, seed by seed, from the same weights where the variant does not say otherwise,
and see the same batches.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from femixer.options import check, check_positive
from femixer.reporting import Column, Group, Score, Table
from femixer.tasks.mad.data.generators import IGNORE
from femixer.tasks.mad.fit import Examples, MadJob, summed_cross_entropy
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.mad.variants import VARIANTS, Variant, begin, optimizer_of
from femixer.tasks.runner import Run, Tabulate
from femixer.training import Results
from femixer.training.jobs import Jobs
from femixer.training.jobs.store import as_text, distinct, same
from femixer.training.results import Record
from femixer.training.seeding import seeded

TASKS = ("fuzzy-recall", "compression")
LEVEL = 0.9
"""A model has learned a task at the first evaluation with a larger accuracy."""


def curve(record: Record) -> Iterator[tuple[int, float]]:
    """Steps and accuracies."""
    for at in record["evaluations"]:
        yield at["step"], at["validation"]["accuracy"]


def learned(record: Record) -> int | None:
    """The step of the first evaluation above LEVEL, if there is one."""
    return next((step for step, accuracy in curve(record) if accuracy > LEVEL), None)


def average(record: Record) -> float:
    """The mean accuracy over all steps; that of the last evaluation stands for those that were not needed."""
    points = [*curve(record)]
    last = (record["steps"], points[-1][1])
    pairs = zip(points, [*points[1:], last], strict=True)
    area = sum((after - before) * (a + b) / 2 for (before, a), (after, b) in pairs)
    return area / record["steps"]


def tabulate(records: Sequence[Record]) -> list[Table]:
    """A table per task: variants in the order of VARIANTS."""
    same(
        records,
        "ways of training",
        lambda record: as_text([record["lr"], record["steps"], record["parameters"]]),
        "task",
    )
    same(records, "variants of one name", lambda record: as_text(record["variant"]), "model")
    records = distinct(records, lambda record: as_text(record["evaluations"]), ("model", "task", "seed"))
    return [table(task, of_task) for task in TASKS if (of_task := [r for r in records if r["task"] == task])]


def training(record: Record) -> str:
    """What variants that are compared must agree in."""
    return as_text([record["lr"], record["steps"], record["parameters"], record["training"]["evaluate_every"]])


def table(task: str, records: Sequence[Record]) -> Table:
    steps, seeds = records[0]["steps"], sorted({record["seed"] for record in records})
    rows = []
    for name in [*VARIANTS, *dict.fromkeys(r["model"] for r in records if r["model"] not in VARIANTS)]:
        own = sorted((record for record in records if record["model"] == name), key=lambda record: record["seed"])
        if own:
            when = [learned(record) for record in own]
            each = ", ".join(f"> {steps}" if step is None else str(step) for step in when)
            middle = sorted(math.inf if step is None else step for step in when)[len(when) // 2]
            shown = f"> {steps}" if middle == math.inf else f"{middle:g}"
            scores = Score({record["seed"]: average(record) for record in own}, len(seeds))
            rows.append([name, shown, each, scores.cell(1, 100), str(own[0]["parameter_count"])])
    every, lr, numbers = records[0]["training"]["evaluate_every"], records[0]["lr"], ", ".join(map(str, seeds))
    title = (
        f"{task}: step of the first evaluation (one every {every} steps) with more than {LEVEL:.0%} of the scored "
        f"tokens right; lr {lr:g}, seeds {numbers}."
    )
    heads = (
        Column("variant"),
        Column("median step", align="right"),
        Column("step of each seed"),
        Column("mean accuracy", key="average", scores=True),
        Column("parameters", align="right"),
    )
    note = (
        f"Mean accuracy: in percent, over all {steps} steps (a job that has learned keeps its last); ± standard error."
    )
    return Table(heads, [Group(rows)], title=title, notes=[note])


@dataclass(frozen=True)
class StudyTabulate(Tabulate):
    """When each variant has learned, over seeds. Writes table.md, which it prints, table.tex and table.csv."""

    results: tuple[Path, ...]
    """Stores of `femixer mad study run`, or files of `femixer mad study export`."""
    out: Path = Path("results/mad-study-table")
    """Folder of the files."""

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records)


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
        with seeded(self.seed, "study"):
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
        check_positive(seeds=self.seeds, steps=self.steps, evaluate_every=self.evaluate_every)
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
