"""How often a classifier is right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from femixer.tasks.vision.views import Views
from femixer.training import distributed

TOP = 5


@dataclass(frozen=True)
class Predictions:
    """Of the pictures that could be read, in their order."""

    numbers: Tensor
    """[n], of the pictures."""
    labels: Tensor
    """[n], the right ones."""
    logits: Tensor
    """[n, classes] in float32."""

    @property
    def chosen(self) -> Tensor:
        return self.logits.argmax(-1)

    def scores(self) -> dict[str, float]:
        """Mean cross entropy, and shares of pictures whose label has the largest logit, or one of the five largest.

        Over all processes, each of which calls this with its own share of the pictures.
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
        """[classes, classes]: how many pictures of the row's class were taken for the column's."""
        classes = self.logits.shape[-1]
        return torch.bincount(self.labels * classes + self.chosen, minlength=classes**2).view(classes, classes)


@torch.no_grad()
def predicted(model: Any, views: Views, batch: int, part: str, workers: int = 0) -> Predictions:
    """This process's share of the pictures. Called in all processes at once; part: their name; workers: as
    of `Views.batches`."""
    device = next(model.parameters()).device
    begin, end = (len(views) * at // distributed.world() for at in (distributed.rank(), distributed.rank() + 1))
    found = [*_found(model, views.batches(torch.arange(begin, end), batch, workers), views, device)]
    if distributed.total(len(found)) == [0]:
        first = next((f"; of {each.name}: {each.reason}" for each in views.broken.values()), "")
        raise ValueError(f"none of the {len(views)} {part} pictures can be read{first}")
    if not found:
        empty = torch.zeros(0, dtype=torch.long)
        return Predictions(empty, empty, torch.zeros(0, model.config.num_labels))
    return Predictions(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _found(
    model: Any, batches: Iterable[tuple[Tensor, Tensor, Tensor]], views: Views, device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    for numbers, pixels, labels in batches:
        check_labels(labels, model.config.num_labels, views, numbers)
        yield numbers, labels, model(pixel_values=pixels.to(device)).logits.float().cpu()


def check_labels(labels: Tensor, classes: int, views: Views, numbers: Tensor) -> None:
    bad = ((labels < 0) | (labels >= classes)).nonzero()
    if len(bad):
        place = int(bad[0])
        name = views.pictures.name(int(numbers[place]))
        raise ValueError(f"{name}: label={int(labels[place])} is not allowed; choose one of 0 to {classes - 1}")
