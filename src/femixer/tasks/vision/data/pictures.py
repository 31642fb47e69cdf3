"""Pictures that can be read one by one (files, arrays, several or some of them as one), and how a model takes them."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from femixer.damage import check_fields, read_json
from femixer.models.vision import FEMImageProcessor
from femixer.models.vision.pictures import Picture, Unreadable, converted, middle, upright
from femixer.optional import require
from femixer.options import check


def decoded(content: Path | bytes, channels: int) -> Picture:
    """The picture in a file, upright (as EXIF says), of 1 or 3 channels; transparent parts are white."""
    image = require("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, large sizes: what matters is whether there are pixels
            with image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as file:
                return upright(file, channels)
    except Exception as error:  # each format's reader has its own
        raise Unreadable(reason(content, error)) from error


def reason(content: Path | bytes, error: Exception) -> str:
    """Why a picture cannot be read, in a line."""
    try:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
    except OSError as problem:
        return problem.strerror or str(problem)
    if size == 0:
        return "the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":
        return "not a format that Pillow knows"
    return " ".join(str(error).split()) or type(error).__name__


class Pictures(Protocol):
    """N pictures in a fixed order."""

    @property
    def blocks(self) -> Sequence[int] | None:
        """Sizes of the blocks, one after the other, within which any order is read well; None: one block of all."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """For people: where to find it."""

    def read(self, index: int, channels: int) -> tuple[Picture, int]:
        """The picture and its label; `Unreadable` if there is none."""


@dataclass(frozen=True)
class Arrays:
    """Grey pictures in memory: pixels [N, H, W] in uint8, labels [N]."""

    pixels: np.ndarray
    labels: Tensor
    title: str
    blocks: None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def name(self, index: int) -> str:
        return f"{self.title} {index}"

    def read(self, index: int, channels: int) -> tuple[Picture, int]:
        picture = require("PIL.Image", "vision").fromarray(self.pixels[index])
        return converted(picture, channels), int(self.labels[index])


@dataclass(frozen=True)
class Files:
    """One file per picture, below `root`; labels [N]."""

    root: Path
    paths: Sequence[str]
    labels: Tensor
    blocks: None = None

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return str(self.root / self.paths[index])

    def read(self, index: int, channels: int) -> tuple[Picture, int]:
        return decoded(self.root / self.paths[index], channels), int(self.labels[index])


@dataclass(frozen=True)
class Joined:
    """The pictures of several parts, one part after the other."""

    parts: Sequence[Pictures]

    @property
    def blocks(self) -> Sequence[int] | None:
        if all(part.blocks is None for part in self.parts):
            return None
        return [size for part in self.parts for size in part.blocks or [len(part)]]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def name(self, index: int) -> str:
        part, place = self._place(index)
        return part.name(place)

    def read(self, index: int, channels: int) -> tuple[Picture, int]:
        part, place = self._place(index)
        return part.read(place, channels)

    def _place(self, index: int) -> tuple[Pictures, int]:
        for part in self.parts:
            if index < len(part):
                return part, index
            index -= len(part)
        raise IndexError(index)


@dataclass(frozen=True)
class Some:
    """Those of `whole` with the given numbers [n], which rise."""

    whole: Pictures
    numbers: Tensor

    @property
    def blocks(self) -> Sequence[int] | None:
        """Those of the whole, each without the pictures that are left out."""
        sizes = self.whole.blocks
        if sizes is None:
            return None
        ends = torch.tensor([*sizes]).cumsum(0)
        return torch.bincount(torch.bucketize(self.numbers, ends, right=True), minlength=len(ends)).tolist()

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.whole.name(int(self.numbers[index]))

    def read(self, index: int, channels: int) -> tuple[Picture, int]:
        return self.whole.read(int(self.numbers[index]), channels)


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
        about = check_fields(read_json(path), FIELDS, path)
        found = cls(**{each.name: about[each.name] for each in fields(cls) if each.name in about})
        for name, least, most in (
            ("size", 1, 2**14),
            ("channels", 1, 64),
            ("crop", 1e-3, 1.0),
            ("validation", 1e-6, 0.999999),
        ):
            value = getattr(found, name)
            fits = value is None or least <= value <= most
            check(fits, f"{path}: {name}", value, f"a number from {least:g} to {most:g}")
        return found


FIELDS = {
    **dict.fromkeys(("size", "channels"), int),
    "crop?": float,
    "pictures?": (str, None),
    "validation?": (float, None),
}
