"""How well a model does a task: its loss and the macro accuracy of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.tasks.mad import IGNORE

BATCH = 128
"""Sequences of one value of the accuracy, whatever the batch of training."""


class Examples(NamedTuple):
    """inputs [N, T] and targets [N, T], IGNORE where nothing is scored."""

    inputs: Tensor
    targets: Tensor


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
