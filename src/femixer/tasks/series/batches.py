"""Batches of training windows."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from femixer.tasks.series.windows import Batch, Windows
from femixer.training import Part, generator


class Batches:
    """All training windows in an order of each epoch's own, as a function of the step: 1, 2, ...

    An epoch has ceil(windows / batch) steps of equally many windows, or one less. A short rest at the end instead, as
    loaders make it, would be a single window for ETTh at 1024 and 96, and that step would count like any other.
    """

    def __init__(self, windows: Windows, batch: int, seed: int) -> None:
        self.windows, self.seed = windows, seed
        self.per_epoch = math.ceil(windows.count / batch)
        self.order = functools.lru_cache(maxsize=1)(self._order)

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.windows.count, generator=generator(self.seed, "order", epoch))

    def __call__(self, step: int, part: Part) -> Batch:
        epoch, index = divmod(step - 1, self.per_epoch)
        begin, end = (self.windows.count * at // self.per_epoch for at in (index, index + 1))
        numbers = self.order(epoch)[begin:end]
        return self.windows.take(numbers[part.rows(len(numbers))])
