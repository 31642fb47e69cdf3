"""How well a model predicts the next token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from femixer.tasks.lm.batches import IGNORED, Batch, Validation
from femixer.training import distributed
from femixer.training.results import Record


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """The sum of -log p(target) over the scored tokens of a batch, in nats."""
    logits = model(batch.inputs, segments=documents(batch.segments), use_cache=False).logits
    targets = batch.targets.flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction="sum")


def documents(segments: Tensor) -> Tensor | None:
    """None where every row is one document without padding: reads that need no mask are faster."""
    whole = bool((segments == segments[:, :1]).all()) and bool((segments[:, 0] >= 0).all())
    return None if whole else segments


def scored(batch: Batch) -> int:
    """Tokens that the loss is over."""
    return int((batch.targets != IGNORED).sum())


def evaluate(model: Any, validation: Validation) -> Iterator[Record]:
    """Loss, perplexity and bits per byte of text, over the held-out windows; the processes share the work."""
    device = next(model.parameters()).device
    part = distributed.part()
    nats, tokens = 0.0, 0
    for batch in validation.batches(part.index, part.count):
        nats += float(summed_loss(model, Batch(*(x.to(device) for x in batch))))
        tokens += scored(batch)
    nats, count = distributed.total(nats, tokens)
    loss = nats / count
    yield {
        "split": "validation",
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / (math.log(2) * validation.bytes),
    }
