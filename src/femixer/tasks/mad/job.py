"""One job: a model trained on one setting of a task, with one learning rate, weight decay and seed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from femixer.models.parameters import parameters_of
from femixer.tasks.mad import sample
from femixer.tasks.mad.model import build
from femixer.tasks.mad.scoring import Examples, score, scored, summed_loss
from femixer.training import EngineOptions, Part, Results, RunOptions, adamw, distributed, generator, train
from femixer.training.jobs.job import digest_of
from femixer.training.results import Record, environment

SPLITS = ("validation", "test")
SOLVED = 0.999
"""Training ends when the accuracy on both splits is above, so that either of them may select afterwards."""


@dataclass(frozen=True)
class Job:
    """Everything that decides the numbers."""

    model: str
    task: str
    parameters: Mapping[str, Any]
    protocol: str
    seed: int
    lr: float
    weight_decay: float
    fields: Mapping[str, Any]
    """Of FEMConfig."""
    batch: int
    steps: int
    evaluate_every: int
    validation: int
    test: int
    precision: Literal["no", "bf16"] = "no"

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self)

    @property
    def title(self) -> str:
        return f"{self.model} {self.task} lr {self.lr:g} wd {self.weight_decay:g} seed {self.seed}"

    @property
    def name(self) -> str:
        return f"{self.title} {self.digest}"

    def summary(self, record: Record) -> str:
        last = record["evaluations"][-1]
        return f"test accuracy {last['test']['accuracy']:.3f} at step {last['step']}"

    def data(self, split: str, device: torch.device) -> Examples:
        sequences = {"train": self.parameters["train"], "validation": self.validation, "test": self.test}[split]
        arrays = sample(self.task, sequences, split, self.seed, **self.parameters)
        return Examples(*(torch.from_numpy(array).to(device) for array in arrays))

    def carry_out(self, options: RunOptions) -> Record:
        """Train in the folder of `options`, from the checkpoint there if there is one: the record of the store."""
        options.apply()
        device = distributed.start()
        results = Results("mad", self, options)
        data = {split: self.data(split, device) for split in SPLITS}
        model = build(self.task, self.fields, self.seed)
        diverged = None
        try:
            train(
                model,
                lambda model: adamw(model, self.lr, self.weight_decay, fused=True),
                batch=Batches(self.data("train", device), self.batch, self.seed),
                losses=lambda model, examples: {"loss": summed_loss(model, examples)},
                items=scored,
                evaluate=lambda model: ({"split": split, **score(model, data[split])} for split in SPLITS),
                results=results,
                steps=self.steps,
                evaluate_every=self.evaluate_every,
                seed=self.seed,
                engine=EngineOptions(precision=self.precision),
                enough=solved,
            )
        except FloatingPointError as error:  # a learning rate that is too high for this model: a result like others
            diverged = str(error)
        return self.record(results.metrics(), diverged, parameters_of(model), device)

    def record(self, metrics: Sequence[Record], diverged: str | None, parameters: int, device: torch.device) -> Record:
        return {
            "model": self.model,
            "task": self.task,
            "parameters": {**self.parameters},
            "protocol": self.protocol,
            "seed": self.seed,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "steps": self.steps,
            "seconds": metrics[-1]["seconds"],
            "parameter_count": parameters,
            "evaluations": [*evaluations(metrics)],
            "diverged": diverged,
            "training": {
                "fields": {**self.fields},
                "batch": self.batch,
                "evaluate_every": self.evaluate_every,
                "validation": self.validation,
                "test": self.test,
                "precision": self.precision,
            },
            "environment": {**environment(), "device": device.type},
        }


def solved(records: Sequence[Record]) -> bool:
    return all(record["accuracy"] > SOLVED for record in records)


def evaluations(metrics: Sequence[Record]) -> Iterator[Record]:
    """One record per step, with the scores of each split."""
    for step in dict.fromkeys(record["step"] for record in metrics):
        scores = {
            record["split"]: {name: round(record[name], 6) for name in ("accuracy", "loss")}
            for record in metrics
            if record["step"] == step
        }
        yield {"step": step, **scores}


class Batches:
    """The training sequences in an order of each epoch's own, as a function of the step: 1, 2, ...

    Where the batch does not divide their number, the last batch of an epoch is smaller.
    """

    def __init__(self, examples: Examples, batch: int, seed: int) -> None:
        self.examples, self.batch, self.seed = examples, batch, seed
        self.per_epoch = math.ceil(len(examples.inputs) / batch)
        self.order = functools.lru_cache(maxsize=1)(self._order)

    def _order(self, epoch: int) -> Tensor:
        order = torch.randperm(len(self.examples.inputs), generator=generator(self.seed, "order", epoch))
        return order.to(self.examples.inputs.device)

    def __call__(self, step: int, part: Part) -> Examples:
        epoch, index = divmod(step - 1, self.per_epoch)
        rows = self.order(epoch)[index * self.batch : (index + 1) * self.batch]
        rows = rows[part.rows(len(rows))]
        return Examples(self.examples.inputs[rows], self.examples.targets[rows])
