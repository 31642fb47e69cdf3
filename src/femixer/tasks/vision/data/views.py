"""Images as tensors, prepared and augmented, and batches of them, as functions of the step; what cannot be read."""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from femixer.damage import check_fields, read_lines
from femixer.models.images import Unreadable, as_tensor
from femixer.options import check
from femixer.tasks.vision.data import Broken, Images, Preparation, blocks_of
from femixer.tasks.vision.data.augmentation import Augmentation
from femixer.training import Part, atomic, distributed, generator
from femixer.training.seeding import Epochs

BROKEN = "broken.jsonl"


class Collected:
    """The images that could not be read, of all processes: a list in the results folder that a resumed run keeps."""

    def __init__(self, folder: Path, known: Iterable[Broken]) -> None:
        self.path = folder / BROKEN
        held = read_lines(self.path) if self.path.exists() else []
        checked = (check_fields(each, {"name": str, "reason": str}, self.path) for each in held)
        self.found = {one.name: one for one in (*known, *(Broken(each["name"], each["reason"]) for each in checked))}
        self.written = len(held)

    def add(self, broken: Iterable[Broken]) -> None:
        for each in broken:
            self.found.setdefault(each.name, each)

    def write(self) -> int:
        """Called in all processes at once: put the list on the disk, if it has grown; how many there are."""
        for others in distributed.gather([*self.found.values()]):
            self.add(others)
        if distributed.is_main() and len(self.found) > self.written:
            for each in [*self.found.values()][self.written :]:
                print(f"skipped: {each.name}: {each.reason}", file=sys.stderr)
            lines = (json.dumps(vars(each)) + "\n" for each in self.found.values())
            atomic.write(self.path, "".join(lines))
        self.written = len(self.found)
        return self.written


REMEMBERED = 1 << 28
"""Bytes of pixels of a split up to which they stay in memory, where each reading would give the same."""

View = tuple[Tensor, int]
"""Pixels [C, S, S] in uint8, and the label."""


class Views:
    """What a model sees of images. What cannot be read is known from the first try on, and not tried again."""

    def __init__(
        self,
        images: Images,
        preparation: Preparation,
        augmentation: Augmentation | None = None,
        labels: Sequence[int] | None = None,
    ) -> None:
        """augmentation: of training, None for the one view of evaluation. labels: those of the model by those of the
        images, None where they are the same."""
        self.images, self.preparation, self.labels = images, preparation, labels
        self.count, self.blocks = len(images), blocks_of(images)
        self.augmentation = augmentation if augmentation is not None and augmentation.of_images else None
        size = self.count * preparation.channels * preparation.size**2
        self.remembers = self.augmentation is None and size <= REMEMBERED
        self.seen: dict[int, View] = {}
        self.broken: dict[int, Broken] = {}

    def __len__(self) -> int:
        return self.count

    def read(self, index: int, generator: Generator | None = None) -> View | None:
        """None if there is no image; `broken` then says why. generator: of the augmentation."""
        if index in self.seen:
            return self.seen[index]
        if index in self.broken:
            return None
        try:
            image, label = self.images[index].read(self.preparation.channels)
        except Unreadable as problem:
            self.broken[index] = Broken(self.images[index].name, str(problem))
            return None
        if self.augmentation is None or generator is None:
            shown = self.preparation.fixed(image)
        else:
            shown = self.augmentation.view(image, self.preparation.size, self.preparation.crop, generator)
        view = as_tensor(shown), label if self.labels is None else self.labels[label]
        if self.remembers:
            self.seen[index] = view
        return view

    def instead(self, index: int, generator: Generator | None = None) -> View:
        """The image, or the first after it that can be read: a batch keeps its size whatever is broken."""
        for number in range(index, index + len(self)):
            view = self.read(number % len(self), generator)
            if view is not None:
                return view
        first = next(iter(self.broken.values()))
        raise ValueError(f"none of the {len(self)} training images can be read; of {first.name}: {first.reason}")

    def batches(self, numbers: Tensor, size: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Those of `numbers` that can be read, `size` at a time: numbers [n], normalized pixels and labels [n].

        workers: processes that read them, where they do not stay in memory and are not a stream.
        """
        elsewhere = workers > 0 and not self.remembers and self.blocks is None
        pieces = [some.tolist() for some in numbers.split(size)]
        made: Iterable[tuple[Tensor, Tensor, Tensor, dict[int, Broken]]] = map(Read(self).__getitem__, pieces)
        if elsewhere:
            made = DataLoader(Read(self), sampler=pieces, batch_size=None, num_workers=workers)
        for found, pixels, labels, broken in made:
            self.broken |= broken
            if len(found):
                yield found, self.preparation.normalized(pixels / 255), labels


class Read(Dataset[tuple[Tensor, Tensor, Tensor, dict[int, Broken]]]):
    """Several views at once: numbers, pixels and labels of those that can be read, and what is wrong with the rest."""

    def __init__(self, views: Views) -> None:
        self.views = views

    def __getitem__(self, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor, dict[int, Broken]]:
        found = {number: view for number in numbers if (view := self.views.read(number)) is not None}
        broken = {number: self.views.broken[number] for number in numbers if number not in found}
        if not found:
            return torch.zeros(0), torch.zeros(0), torch.zeros(0), broken
        return torch.tensor([*found]), *stacked([*found.values()]), broken


def spread(labels: Tensor, count: int) -> list[int]:
    """`count` places of labels [n], of as many classes as possible: the first of each class, then the second, ..."""
    seen: dict[int, int] = {}
    turns = []
    for label in labels.tolist():
        turns.append(seen.get(label, 0))
        seen[label] = turns[-1] + 1
    return sorted(sorted(range(len(turns)), key=lambda place: (turns[place], place))[:count])


def stacked(views: list[View]) -> tuple[Tensor, Tensor]:
    """Pixels [n, C, S, S] in uint8 and labels [n]."""
    return torch.stack([pixels for pixels, _ in views]), torch.tensor([label for _, label in views])


AHEAD = 2
"""Batches that each worker keeps ready."""


class Batch(NamedTuple):
    pixels: Tensor
    """[B, C, S, S], normalized."""
    targets: Tensor
    """[B, classes], probabilities."""


class Batches(Dataset[tuple[Batch, list[Broken]]]):
    """(step, part) -> a batch and what could not be read for it.

    Augmentations are drawn from generators of (seed, epoch, place of the image in the epoch) and of (seed, step,
    part): a batch does not depend on what was made before it, nor on which process makes it.
    """

    def __init__(self, views: Views, augmentation: Augmentation, classes: int, batch: int, seed: int) -> None:
        self.views, self.augmentation, self.classes, self.seed = views, augmentation, classes, seed
        # Places of an epoch: where every image takes several, the places are divided and not the images.
        self.epochs = Epochs(len(views), batch, seed, self._order)
        self.per_epoch = self.epochs.per_epoch

    def _order(self, epoch: int) -> Tensor:
        """The images of an epoch's places, and the places: [count, 2]."""
        sizes = self.views.blocks or [len(self.views)]
        images = shuffled(sizes, self.augmentation.repeats, generator(self.seed, "order", epoch))
        return torch.stack([images, torch.arange(len(images))], 1)

    def __getitem__(self, key: tuple[int, Part]) -> tuple[Batch, list[Broken]]:
        return self(*key)

    def __call__(self, step: int, part: Part) -> tuple[Batch, list[Broken]]:
        epoch, known = self.epochs.epoch(step), len(self.views.broken)
        views = [
            # Another word than "picture" would be other random numbers. Views without augmentation draw none.
            self.views.instead(index, generator(self.seed, "picture", epoch, place))
            for index, place in self.epochs(step, part).tolist()
        ]
        drawing = generator(self.seed, "batch", step, part.index)
        made = self.augmentation.batch(*stacked(views), self.classes, self.views.preparation, drawing)
        return Batch(*made), [*self.views.broken.values()][known:]


def shuffled(sizes: Sequence[int], repeats: int, drawing: torch.Generator) -> Tensor:
    """The numbers of blocks of these sizes, block after block and in random order within each.

    Where each number comes `repeats` times in a row, a share 1 / repeats of each block is there: of every block, so
    that no image of a stream is always left out.
    """
    starts = itertools.accumulate(sizes, initial=0)
    orders = [start + torch.randperm(size, generator=drawing) for start, size in zip(starts, sizes, strict=False)]
    return torch.cat([order.repeat_interleave(repeats)[: len(order)] for order in orders])


class Ahead:
    """Batches from worker processes (a torch DataLoader), which are told the steps to come."""

    def __init__(self, batches: Batches, workers: int, parts: Sequence[Part], steps: int) -> None:
        """parts: those of each step that this process asks for, in this order."""
        check(workers == 0 or batches.views.blocks is None, "workers", workers, "0: one process reads a stream")
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
                self.batches,
                sampler=[*first, *rest],
                batch_size=None,  # they are batches already
                num_workers=self.workers,
                prefetch_factor=AHEAD,
            )
        )
