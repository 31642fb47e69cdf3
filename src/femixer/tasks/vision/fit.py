"""Training a classifier: to the best validation accuracy, whose weights are then scored on the test part, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from femixer.damage import check_tensor
from femixer.models.named import parameters_of
from femixer.options import Whole
from femixer.tasks.vision.data import DataSet, Preparation
from femixer.tasks.vision.data.views import Ahead, Batch, Batches, Collected, Views
from femixer.tasks.vision.model import Classifier, Spec, build_model
from femixer.training import (
    EngineOptions,
    Fit,
    Part,
    Results,
    TrainOptions,
    adamw,
    cosine,
    distributed,
    full_weights,
    train,
)
from femixer.training.journal import counting
from femixer.training.loop import Best, Error, with_test
from femixer.training.results import Record, environment

KEY = "average"


def averaging(optimizer: Optimizer, decay: float) -> Optimizer:
    """After every step: average = decay * average + (1 - decay) * weights, from the weights of the first step on.

    It is kept in the optimizer's state, with which it is saved, restored and sharded.
    """

    @torch.no_grad()
    def update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[parameter]
            if KEY in state:
                state[KEY].lerp_(parameter, 1 - decay)
            else:
                state[KEY] = parameter.detach().clone()

    optimizer.register_step_post_hook(update)
    return optimizer


@contextmanager
def averaged(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
    """The model with the averaged weights in it, as long as this lasts."""
    own: dict[nn.Parameter, Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if KEY in optimizer.state.get(parameter, {}):
                own[parameter] = parameter.detach().clone()
                parameter.copy_(optimizer.state[parameter][KEY])
    try:
        yield model
    finally:
        with torch.no_grad():
            for parameter, value in own.items():
                parameter.copy_(value)


TOP = 5


@dataclass(frozen=True)
class Predictions:
    """Of the images that could be read, in their order."""

    numbers: Tensor
    """[n], of the images."""
    labels: Tensor
    """[n], the right ones."""
    logits: Tensor
    """[n, classes] in float32."""

    @property
    def chosen(self) -> Tensor:
        return self.logits.argmax(-1)

    def scores(self) -> dict[str, float]:
        """Mean cross entropy, and shares of images whose label has the largest logit, or one of the five largest.

        Over all processes, each of which calls this with its own share of the images.
        """
        count, classes = self.logits.shape
        nearest = self.logits.topk(min(TOP, classes), -1).indices == self.labels[:, None]
        sums = [F.cross_entropy(self.logits, self.labels, reduction="sum").item() if count else 0.0]
        sums += [nearest[:, 0].sum().item(), nearest.sum().item()]
        *means, total = distributed.total(*sums, count)
        loss, top1, top5 = (value / total for value in means)
        return {"loss": loss, "top1": top1, "top5": top5}

    def gathered(self) -> Predictions:
        """Those of all processes together, in every one of them."""
        parts = distributed.gather((self.numbers, self.labels, self.logits))
        return Predictions(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def confusion(self) -> Tensor:
        """[classes, classes]: how many images of the row's class were taken for the column's."""
        classes = self.logits.shape[-1]
        return torch.bincount(self.labels * classes + self.chosen, minlength=classes**2).view(classes, classes)


@torch.no_grad()
def predicted(model: Any, views: Views, batch: int, part: str, workers: int = 0) -> Predictions:
    """This process's share of the images. Called in all processes at once; part: their name; workers: as
    of `Views.batches`."""
    device = next(model.parameters()).device
    begin, end = (len(views) * at // distributed.world() for at in (distributed.rank(), distributed.rank() + 1))
    found, classes = [], model.config.num_labels
    with counting(end - begin, f"{part} images") as told:
        for numbers, pixels, labels in views.batches(torch.arange(begin, end), batch, workers):
            for place in ((labels < 0) | (labels >= classes)).nonzero()[:1].flatten().tolist():
                name, label = views.images[int(numbers[place])].name, int(labels[place])
                raise ValueError(f"{name}: label={label} is not allowed; choose one of 0 to {classes - 1}")
            logits = model(pixel_values=pixels.to(device)).logits.float().cpu()
            found.append((numbers, labels, check_tensor(logits, "the logits of the model")))
            told(len(numbers))
    if distributed.total(len(found)) == [0]:
        first = next((f"; of {each.name}: {each.reason}" for each in views.broken.values()), "")
        raise ValueError(f"none of the {len(views)} {part} images can be read{first}")
    if not found:
        empty = torch.zeros(0, dtype=torch.long)
        return Predictions(empty, empty, torch.zeros(0, classes))
    return Predictions(*(torch.cat(parts) for parts in zip(*found, strict=True)))


WIDER = 4
"""Batches of training that are scored at once: nothing is kept for a backward pass."""


@dataclass(frozen=True)
class Loading:
    """How images get to the model: nothing here changes what is computed."""

    workers: Whole = 0
    """Processes that read and augment images ahead of time; 0 does it in between steps."""


@dataclass(frozen=True)
class Fitted:
    """A model with its best weights, what it says of the test images, and its record."""

    classifier: Classifier
    test: Views
    predictions: Predictions
    record: Record


def fitted(
    spec: Spec, dataset: DataSet, results: Results, loading: Loading | None = None, engine: EngineOptions | None = None
) -> Fitted:
    """Train in the folder of `results`, from the checkpoint there if there is one."""
    device, model = distributed.start(), build_model(spec, dataset)
    preparation = Preparation(
        model.config.image_size, dataset.channels, spec.eval_crop, dataset.whole, dataset.validation
    )
    views = {
        split: Views(images, preparation, spec.augmentation if split == "train" else None)
        for split, images in dataset.splits.items()
    }
    broken = Collected(results.folder, dataset.broken)
    run = Fitting(spec, model.to(device), views, results, broken, (loading or Loading()).workers)
    diverged = None
    try:
        run.fit(len(dataset.classes), engine or EngineOptions())
    except FloatingPointError as error:  # a rate that is too high for this model: a result like others
        diverged = str(error)
    step = run.best.load()
    run.model.eval()
    predictions = predicted(run.model, views["test"], WIDER * spec.training.batch, "test", run.workers)
    run.broken.add(views["test"].broken.values())
    skipped = run.broken.write()
    metrics = with_test(results, lambda: {**predictions.scores(), "broken": skipped})
    record = run.record(metrics, step, dataset, diverged, device)
    return Fitted(Classifier(run.model, preparation), views["test"], predictions.gathered(), record)


class Fitting:
    """One training."""

    def __init__(
        self, spec: Spec, model: Any, views: Mapping[str, Views], results: Results, broken: Collected, workers: int
    ) -> None:
        self.spec, self.model, self.views, self.results, self.broken = spec, model, views, results, broken
        self.workers = workers
        self.best = Best(model, results, error, weights=self.better)
        self.optimizer: Optimizer | None = None

    def fit(self, classes: int, engine: EngineOptions) -> None:
        how = self.spec.training
        batches = Batches(self.views["train"], self.spec.augmentation, classes, how.batch, self.spec.seed)
        steps = how.epochs * batches.per_epoch
        ahead = Ahead(batches, self.workers, distributed.own_parts(engine.accumulate), steps)

        def batch(step: int, part: Part) -> Batch:
            made, broken = ahead(step, part)
            self.broken.add(broken)
            return made

        fit = Fit(
            model=self.model,
            optimizer=self.optimized,
            batch=batch,
            losses=lambda model, batch: {"loss": summed_loss(model, batch)},
            items=lambda batch: len(batch.targets),
            evaluate=self.evaluate,
            enough=self.best.enough,
        )
        options = TrainOptions(
            steps=steps,
            evaluate_every=batches.per_epoch,
            seed=self.spec.seed,
            schedule=cosine(steps, round(how.warmup_epochs * batches.per_epoch), how.min_lr_fraction),
            clip=how.clip,
            log_every=batches.per_epoch,
            engine=engine,
        )
        train(fit, options, self.results)

    def optimized(self, model: Any) -> Optimizer:
        how = self.spec.training
        self.optimizer = adamw(model, how.lr, how.weight_decay, fused=True)
        return averaging(self.optimizer, how.ema) if how.ema else self.optimizer

    def evaluate(self, model: Any) -> list[Record]:
        """Scores of the validation part; with a moving average of the weights also its, as average_..."""
        record: Record = {"split": "validation", **self.score(model)}
        if self.optimizer is not None and self.spec.training.ema:
            with averaged(model, self.optimizer):
                record |= {f"average_{name}": value for name, value in self.score(model).items()}
        for views in self.views.values():
            self.broken.add(views.broken.values())
        self.broken.write()
        return [record]

    def score(self, model: Any) -> dict[str, float]:
        batch = WIDER * self.spec.training.batch
        return predicted(model, self.views["validation"], batch, "validation", self.workers).scores()

    def better(self) -> dict[str, Tensor]:
        """The weights of the last evaluation, or their average if that was better."""
        last = [each for each in distributed.on_main(self.results.metrics) if each["split"] == "validation"][-1]
        if self.optimizer is None or not averages(last):
            return full_weights(self.model)
        with averaged(self.model, self.optimizer):
            return {name: value.clone() for name, value in full_weights(self.model).items()}

    def record(
        self, metrics: list[Record], step: int, dataset: DataSet, diverged: str | None, device: torch.device
    ) -> Record:
        """What a store keeps of a training."""
        own = asdict(self.spec)
        validation = [each for each in metrics if each["split"] == "validation"]
        best = next(each for each in validation if each["step"] == step)
        return {
            **{name: value for name, value in own.items() if name != "parameters"},
            "classes": len(dataset.classes),
            "images": dataset.counts,
            **{name: metrics[-1][name] for name in ("top1", "top5", "loss", "broken")},
            "validation_top1": 1 - error(best)[0],
            "validation_loss": error(best)[1],
            "weights": "average" if averages(best) else "last",
            "best_step": step,
            "steps": validation[-1]["step"],
            "seconds": metrics[-1]["seconds"],
            "parameter_count": parameters_of(self.model),
            "evaluations": [{name: of[name] for name in of if name not in ("split", "seconds")} for of in validation],
            "diverged": diverged,
            "environment": {**environment(), "device": device.type},
        }


def errors(record: Record) -> list[Error]:
    """Of a validation record: the share of wrong answers and the loss, of the weights and of their average if any."""
    of = [name for name in ("", "average_") if f"{name}top1" in record]
    return [(1 - record[f"{name}top1"], record[f"{name}loss"]) for name in of]


def error(record: Record) -> Error:
    """Of the better weights."""
    return min(errors(record))


def averages(record: Record) -> bool:
    """Are the averaged weights the better ones?"""
    own, *averaged = errors(record)
    return any(each < own for each in averaged)


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """Cross entropy with the targets' probabilities, over the images of a batch."""
    return F.cross_entropy(model(pixel_values=batch.pixels).logits.float(), batch.targets, reduction="sum")
