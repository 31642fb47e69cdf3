"""Which examples a step takes, where training goes over all of them again and again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from femixer.training.distributed import Part
from femixer.training.seeding import generator


class Epochs:
    """The numbers 0 to count - 1 in an order of each epoch's own, as a function of the step: 1, 2, ...

    An epoch has ceil(count / batch) steps of equally many numbers, or one less. A short rest at the end instead, as
    loaders make it, may be a single example, and that step would count like any other.
    """

    def __init__(self, count: int, batch: int, seed: int, order: Callable[[int], Tensor] | None = None) -> None:
        """order: epoch -> the numbers [count] in its order, by default a permutation that the seed decides."""
        self.count, self.seed = count, seed
        self.per_epoch = math.ceil(count / batch)
        self.order = functools.lru_cache(maxsize=1)(order or self._order)

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=generator(self.seed, "order", epoch))

    def __call__(self, step: int, part: Part) -> Tensor:
        """The numbers of one part of the global batch of a step."""
        epoch, index = divmod(step - 1, self.per_epoch)
        begin, end = (self.count * at // self.per_epoch for at in (index, index + 1))
        numbers = self.order(epoch)[begin:end]
        return numbers[part.rows(len(numbers))]

    def epoch(self, step: int) -> int:
        """From 0."""
        return (step - 1) // self.per_epoch
