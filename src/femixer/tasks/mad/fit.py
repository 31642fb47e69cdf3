"""One job: a model trained on one setting of a task, with one learning rate, weight decay and seed, and its scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.named import parameters_of
from femixer.tasks.mad.data import IGNORE, sample
from femixer.tasks.mad.model import build
from femixer.tasks.mad.protocol import Protocol
from femixer.training import (
    EngineOptions,
    Fit,
    Results,
    RunOptions,
    TrainOptions,
    adamw,
    distributed,
    train,
)
from femixer.training.jobs import Job
from femixer.training.results import Record, environment
from femixer.training.seeding import Epochs

BATCH = 128
"""Sequences of one value of the accuracy, whatever the batch of training."""


class Examples(NamedTuple):
    """inputs [N, T] and targets [N, T], IGNORE where nothing is scored."""

    inputs: Tensor
    targets: Tensor

    def rows(self, numbers: Tensor) -> "Examples":
        return Examples(self.inputs[numbers], self.targets[numbers])


def summed_loss(model: Callable[..., Any], examples: Examples) -> Tensor:
    """The sum of -log p(target) over the scored positions, in nats."""
    logits = model(examples.inputs, use_cache=False).logits
    return summed_cross_entropy(logits, examples.targets)


def scored(examples: Examples) -> int:
    """Positions that the loss is over."""
    return int((examples.targets != IGNORE).sum())


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def score(model: Callable[..., Any], examples: Examples) -> dict[str, float]:
    """The mean loss over all scored positions, and the accuracy: the mean over batches of BATCH sequences, each
    weighted by its number of sequences, of the macro accuracy within the batch."""
    device = examples.inputs.device
    loss, accuracy = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for inputs, targets in zip(examples.inputs.split(BATCH), examples.targets.split(BATCH), strict=True):
        logits = model(inputs, use_cache=False).logits
        loss += summed_cross_entropy(logits, targets)
        accuracy += macro_accuracy(logits.argmax(-1), targets, logits.shape[-1]) * len(inputs)
    return {"accuracy": float(accuracy) / len(examples.inputs), "loss": float(loss) / max(scored(examples), 1)}


def macro_accuracy(predicted: Tensor, targets: Tensor, classes: int) -> Tensor:
    """The mean over classes c of (positions with target c that are predicted as c) / (positions with target c).

    Taken are the classes that occur among the scored positions, as target or as prediction: one that is only ever
    predicted counts as 0. So does the original (torchmetrics' MulticlassAccuracy, average="macro"). 0 where nothing is
    scored.
    """
    of_interest = targets != IGNORE
    predicted, targets = predicted[of_interest], targets[of_interest]
    shown = torch.bincount(targets, minlength=classes)
    hit = torch.bincount(targets[predicted == targets], minlength=classes)
    present = shown + torch.bincount(predicted, minlength=classes) > 0
    return (hit / shown.clamp(min=1)).sum() / present.sum().clamp(min=1)


SOLVED = 0.999
"""Training ends when the accuracy on both splits is above, so that either of them may select afterwards."""


@dataclass(frozen=True)
class MadJob(Job):
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
    gates: Literal["own", "torch"] = "own"
    """How gates, decays and conditioners start: as their mixer says, or as torch starts all linear maps."""
    splits: ClassVar[tuple[str, ...]] = ("validation", "test")
    """On which it is evaluated."""

    @classmethod
    def of(cls, how: Protocol, task: str, parameters: Mapping[str, Any], row: Mapping[str, Any], **own: Any) -> Self:
        """As a protocol says; row: fields of FEMConfig besides the sizes, own: the fields of the job besides these."""
        tokens = {"vocab_size": parameters["vocabulary"], "max_position_embeddings": parameters["length"]}
        return cls(
            task=task,
            parameters=parameters,
            fields={**how.sizes(), **row, **tokens},
            batch=how.plan(task).batch,
            validation=how.validation,
            test=how.test,
            precision=how.precision,
            **own,
        )

    @property
    def title(self) -> str:
        return f"{self.model} {self.task} lr {self.lr:g} wd {self.weight_decay:g} seed {self.seed}"

    def summary(self, record: Record) -> str:
        last = record["evaluations"][-1]
        return f"test accuracy {last['test']['accuracy']:.3f} at step {last['step']}"

    def data(self, split: str, device: torch.device) -> Examples:
        sequences = {"train": self.parameters["train"], "validation": self.validation, "test": self.test}[split]
        arrays = sample(self.task, sequences, split, self.seed, **self.parameters)
        return Examples(*(torch.from_numpy(array).to(device) for array in arrays))

    def built(self) -> nn.Module:
        return build(self.task, self.fields, self.seed, self.gates)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model, self.lr, self.weight_decay, fused=True)

    def score(self, model: Callable[..., Any], examples: Examples) -> dict[str, float]:
        """accuracy and loss."""
        return score(model, examples)

    def ended(self, records: Sequence[Record], results: Results) -> bool:
        """Whether training may end with the evaluation of these records."""
        return solved(records)

    def carry_out(self, options: RunOptions) -> Record:
        """Train in the folder of `options`, from the checkpoint there if there is one: the record of the store."""
        options.apply()
        device = distributed.start()
        results = Results("mad", self, options)
        data = {split: self.data(split, device) for split in self.splits}
        examples = self.data("train", device)
        epochs = Epochs(len(examples.inputs), self.batch, self.seed, even=False)
        model = self.built()
        diverged = None
        try:
            fit = Fit(
                model=model,
                optimizer=self.optimizer,
                batch=lambda step, part: examples.rows(epochs(step, part)),
                losses=lambda model, examples: {"loss": summed_loss(model, examples)},
                items=scored,
                evaluate=lambda model: ({"split": split, **self.score(model, data[split])} for split in data),
                enough=lambda records: self.ended(records, results),
            )
            engine = EngineOptions(precision=self.precision)
            train(fit, TrainOptions(self.steps, self.evaluate_every, self.seed, engine=engine), results)
        except FloatingPointError as error:  # a learning rate that is too high for this model: a result like others
            if not results.metrics():  # not even the untrained model has a result
                raise
            diverged = str(error)
        return self.record(results.metrics(), diverged, parameters_of(model), device)

    def record(self, metrics: Sequence[Record], diverged: str | None, parameters: int, device: torch.device) -> Record:
        """What a store keeps of a training."""
        own, evaluations = asdict(self), []
        for step in dict.fromkeys(record["step"] for record in metrics):
            at = {record["split"]: record for record in metrics if record["step"] == step}
            scores = {s: {name: round(of[name], 6) for name in ("accuracy", "loss")} for s, of in at.items()}
            evaluations.append({"step": step, **scores})
        how = ("fields", "batch", "evaluate_every", "validation", "test", "precision", "gates")
        return {
            **{name: value for name, value in own.items() if name not in how},
            "seconds": metrics[-1]["seconds"],
            "parameter_count": parameters,
            "evaluations": evaluations,
            "diverged": diverged,
            "training": {name: own[name] for name in how},
            "environment": {**environment(), "device": device.type},
        }


def solved(records: Sequence[Record]) -> bool:
    return all(record["accuracy"] > SOLVED for record in records)
