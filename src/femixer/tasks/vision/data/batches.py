"""Batches of training pictures, as a function of the step: made here, or ahead of time in worker processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from femixer.options import check
from femixer.tasks.vision.data import Broken
from femixer.tasks.vision.data.augmentation import Augmentation
from femixer.tasks.vision.data.views import Views, stacked
from femixer.training import Part, generator
from femixer.training.seeding import Epochs

AHEAD = 2
"""Batches that each worker keeps ready."""


class Batch(NamedTuple):
    pixels: Tensor
    """[B, C, S, S], normalized."""
    targets: Tensor
    """[B, classes], probabilities."""


class Batches:
    """(step, part) -> a batch and what could not be read for it.

    Augmentations are drawn from generators of (seed, epoch, place of the picture in the epoch) and of (seed, step,
    part): a batch does not depend on what was made before it, nor on which process makes it.
    """

    def __init__(self, views: Views, augmentation: Augmentation, classes: int, batch: int, seed: int) -> None:
        self.views, self.augmentation, self.classes, self.seed = views, augmentation, classes, seed
        # Places of an epoch: where every picture takes several, the places are divided and not the pictures.
        self.epochs = Epochs(len(views), batch, seed, self._order)
        self.per_epoch = self.epochs.per_epoch

    def _order(self, epoch: int) -> Tensor:
        """The pictures of an epoch's places, and the places: [count, 2]."""
        sizes = self.views.pictures.blocks or [len(self.views)]
        pictures = shuffled(sizes, self.augmentation.repeats, generator(self.seed, "order", epoch))
        return torch.stack([pictures, torch.arange(len(pictures))], 1)

    def __call__(self, step: int, part: Part) -> tuple[Batch, list[Broken]]:
        epoch, known = self.epochs.epoch(step), len(self.views.broken)
        views = [
            self.views.instead(index, self._generator(epoch, place))
            for index, place in self.epochs(step, part).tolist()
        ]
        drawing = generator(self.seed, "batch", step, part.index)
        made = self.augmentation.batch(*stacked(views), self.classes, self.views.preparation, drawing)
        return Batch(*made), [*self.views.broken.values()][known:]

    def _generator(self, epoch: int, place: int) -> torch.Generator | None:
        return None if self.views.augmentation is None else generator(self.seed, "picture", epoch, place)


def shuffled(sizes: Sequence[int], repeats: int, drawing: torch.Generator) -> Tensor:
    """The numbers of blocks of these sizes, block after block and in random order within each.

    Where each number comes `repeats` times in a row, a share 1 / repeats of each block is there: of every block, so
    that no picture of a stream is always left out.
    """
    starts = itertools.accumulate(sizes, initial=0)
    orders = [start + torch.randperm(size, generator=drawing) for start, size in zip(starts, sizes, strict=False)]
    return torch.cat([order.repeat_interleave(repeats)[: len(order)] for order in orders])


class Ahead:
    """Batches from worker processes (a torch DataLoader), which are told the steps to come."""

    def __init__(self, batches: Batches, workers: int, parts: Sequence[Part], steps: int) -> None:
        """parts: those of each step that this process asks for, in this order."""
        check(
            workers == 0 or batches.views.pictures.blocks is None, "workers", workers, "0: one process reads a stream"
        )
        self.batches, self.workers, self.parts, self.steps = batches, workers, [*parts], steps
        self.coming: Iterator[tuple[Batch, list[Broken]]] | None = None
        self.expected: tuple[int, Part] | None = None

    def __call__(self, step: int, part: Part) -> tuple[Batch, list[Broken]]:
        if self.workers == 0:
            return self.batches(step, part)
        if self.coming is None or self.expected != (step, part):
            self.coming = self._start(step, part)
        made = next(self.coming)
        at = self.parts.index(part) + 1
        self.expected = (step, self.parts[at]) if at < len(self.parts) else (step + 1, self.parts[0])
        return made

    def _start(self, step: int, part: Part) -> Iterator[tuple[Batch, list[Broken]]]:
        first = [(step, each) for each in self.parts[self.parts.index(part) :]]
        rest = ((later, each) for later in range(step + 1, self.steps + 1) for each in self.parts)
        return iter(
            DataLoader(
                Called(self.batches),
                sampler=[*first, *rest],
                batch_size=None,  # they are batches already
                num_workers=self.workers,
                prefetch_factor=AHEAD,
            )
        )


class Called(Dataset[tuple[Batch, list[Broken]]]):
    """A function as a Dataset."""

    def __init__(self, make: Callable[[int, Part], tuple[Batch, list[Broken]]]) -> None:
        self.make = make

    def __getitem__(self, key: tuple[int, Part]) -> tuple[Batch, list[Broken]]:
        return self.make(*key)
