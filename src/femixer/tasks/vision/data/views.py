"""Pictures as tensors: prepared as the model takes them, augmented or not, and what could not be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from femixer.models.vision import FEMImageProcessor
from femixer.models.vision.pictures import Picture, Unreadable, as_tensor, middle
from femixer.options import check
from femixer.tasks.vision.data import Broken
from femixer.tasks.vision.data.augmentation import Augmentation
from femixer.tasks.vision.data.pictures import Pictures
from femixer.training import atomic, distributed

PREPARATION = "preparation.json"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of its channels, with pixels in [0, 1]: used for all pictures in colour, as is usual."""
GREY = (0.5,), (0.5,)


@dataclass(frozen=True)
class Preparation:
    """Saved beside a model, which is of no use without it."""

    size: int
    channels: int
    crop: float = 1.0
    """Share of the shorter side that evaluation sees: it is made size / crop long, and the middle is taken."""
    pictures: str | None = None
    """Which ones the model was trained on: their `Images.whole`."""
    validation: float | None = None
    """Share of them that was held out of training; None: they have a validation part."""

    def fixed(self, picture: Picture) -> Picture:
        """The view that evaluation has of a picture."""
        return middle(picture, self.size, self.crop)

    def normalized(self, pixels: Tensor) -> Tensor:
        """[..., C, H, W] in [0, 1] -> mean and deviation of about 0 and 1."""
        mean, deviation = (torch.tensor(values, device=pixels.device)[:, None, None] for values in self.scale)
        return (pixels - mean) / deviation

    @property
    def scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return GREY if self.channels == 1 else IMAGENET

    def save(self, folder: Path) -> None:
        mean, deviation = self.scale
        about = {**asdict(self), "mean": mean, "deviation": deviation, "resampling": "bicubic"}
        (folder / PREPARATION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        FEMImageProcessor(self.size, self.channels, self.crop, mean, deviation).save_pretrained(folder)

    @classmethod
    def load(cls, folder: Path) -> Preparation:
        path = folder / PREPARATION
        check(path.is_file(), "model", str(folder), f"a model of `femixer vision train`, which has {PREPARATION}")
        about = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{each.name: about[each.name] for each in fields(cls) if each.name in about})


BROKEN = "broken.jsonl"


class Collected:
    """Of all processes; those of before an interruption stay."""

    def __init__(self, folder: Path, known: Iterable[Broken]) -> None:
        self.path = folder / BROKEN
        held = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.found = {broken.name: broken for broken in (*known, *(Broken(**json.loads(line)) for line in held))}
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
    """What a model sees of pictures. What cannot be read is known from the first try on, and not tried again."""

    def __init__(self, pictures: Pictures, preparation: Preparation, augmentation: Augmentation | None = None) -> None:
        """augmentation: of training, None for the one view of evaluation."""
        self.pictures, self.preparation = pictures, preparation
        self.augmentation = augmentation if augmentation is not None and augmentation.of_pictures else None
        size = len(pictures) * preparation.channels * preparation.size**2
        self.remembers = self.augmentation is None and size <= REMEMBERED
        self.seen: dict[int, View] = {}
        self.broken: dict[int, Broken] = {}

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int, generator: Generator | None = None) -> View | None:
        """None if there is no picture; `broken` then says why. generator: of the augmentation."""
        if index in self.seen:
            return self.seen[index]
        if index in self.broken:
            return None
        try:
            picture, label = self.pictures.read(index, self.preparation.channels)
        except Unreadable as problem:
            self.broken[index] = Broken(self.pictures.name(index), str(problem))
            return None
        if self.augmentation is None or generator is None:
            shown = self.preparation.fixed(picture)
        else:
            shown = self.augmentation.view(picture, self.preparation.size, self.preparation.crop, generator)
        view = as_tensor(shown), label
        if self.remembers:
            self.seen[index] = view
        return view

    def instead(self, index: int, generator: Generator | None = None) -> View:
        """The picture, or the first after it that can be read: a batch keeps its size whatever is broken."""
        for number in range(index, index + len(self)):
            view = self.read(number % len(self), generator)
            if view is not None:
                return view
        first = next(iter(self.broken.values()))
        raise ValueError(f"none of the {len(self)} training pictures can be read; of {first.name}: {first.reason}")

    def batches(self, numbers: Tensor, size: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Those of `numbers` that can be read, `size` at a time: numbers [n], normalized pixels and labels [n].

        workers: processes that read them, where they do not stay in memory and are not a stream.
        """
        elsewhere = workers > 0 and not self.remembers and self.pictures.blocks is None
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
