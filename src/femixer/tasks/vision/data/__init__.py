"""Pictures by their address: a folder with a folder per class, a data set of the hub, or the digits; their parts."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from femixer.optional import require
from femixer.options import check, check_positive
from femixer.tasks.vision.data.pictures import Arrays, Pictures, Some
from femixer.training import generator

SEED = 0
"""Of all divisions: that of a training has no say in them."""


def stratified(labels: Tensor, share: float, purpose: str) -> tuple[Tensor, Tensor]:
    """The numbers of the rest and of the part that is held out, both rising: round(share * N) of all N.

    Of each class its share, rounded down, and one more for those that lose most by that. The last of a class is never
    held out.
    """
    order = torch.randperm(len(labels), generator=generator(SEED, purpose))
    members = {label: order[labels[order] == label] for label in labels.unique().tolist()}
    wanted = {label: min(share * len(own), len(own) - 1) for label, own in members.items()}
    counts = {label: math.floor(number) for label, number in wanted.items()}
    left = round(share * len(labels)) - sum(counts.values())
    for label in sorted(wanted, key=lambda label: counts[label] - wanted[label])[: max(left, 0)]:
        counts[label] += counts[label] < wanted[label]
    held = torch.cat([own[: counts[label]] for label, own in members.items()]).sort().values
    return without(len(labels), held), held


def without(count: int, held: Tensor) -> Tensor:
    """The numbers 0 to count - 1 that are not held."""
    kept = torch.ones(count, dtype=torch.bool)
    kept[held] = False
    return kept.nonzero()[:, 0]


DIGITS = "digits"
ABOUT_DIGITS = "the 1,797 handwritten digits of scikit-learn"
PREFIX = "datasets:"
TEST_SHARE = 0.2
"""Of the pictures, where they come in one part."""
HELD_OUT = 0.1
"""Of the training pictures, where they have no validation part."""
SPLITS = ("train", "validation", "test")
NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""How the parts are called, by folders and data sets."""


@dataclass(frozen=True)
class Reading:
    """How pictures are read."""

    validation: float | None = None
    """Share of the training pictures, of each class alike, that is held out to choose the best weights by, where the
    data have no validation part of their own; by default 0.1, or what the model to be evaluated was trained with."""
    image_column: str | None = None
    """Column of the pictures of a `datasets:` data set, by default the first one of its image type."""
    label_column: str | None = None
    """Column of the labels, by default the only one of its class type, or the one called label or fine_label."""
    streaming: bool = False
    """Read a `datasets:` data set as it comes instead of keeping a copy."""
    buffer: int = 10_000
    """Pictures of a stream that are shuffled together."""

    @property
    def share(self) -> float:
        """That is held out."""
        return HELD_OUT if self.validation is None else self.validation

    def validate(self) -> None:
        check(0 < self.share < 1, "validation", self.validation, "a share between 0 and 1")
        check_positive(buffer=self.buffer)


@dataclass(frozen=True)
class Broken:
    """A picture that cannot be read."""

    name: str
    reason: str


@dataclass(frozen=True)
class Images:
    """Pictures in their parts."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Pictures]
    fingerprint: str
    """A hash of what decides which pictures are where; not of the pixels of files."""
    channels: int
    broken: Sequence[Broken] = field(default_factory=tuple)
    """What was seen to be no picture without reading it."""
    whole: str = ""
    """A hash of the pictures, however they are divided."""
    validation: float | None = None
    """Share of the training pictures that is held out; None: the data have a validation part, or no training part."""
    one_part: bool = False
    """Do they come in one part, which is divided here?"""

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(pictures) for split, pictures in self.splits.items()}


def read(data: str, reading: Reading | None = None, channels: int | None = None) -> Images:
    """The pictures that `data` names, in the three parts that a training needs."""
    images = found(data, reading, channels)
    if len(images.classes) < 2:
        raise ValueError(
            f"data={data!r} has one class only, {', '.join(images.classes)}; a classifier needs two or more"
        )
    if "train" not in images.splits or "test" not in images.splits:
        there = " and ".join(images.splits)
        needed = "a training and another part (val, validation or test), or all pictures in one"
        raise ValueError(f"data={data!r} has only a part for {there}; training needs {needed}")
    for split in SPLITS:
        check(len(images.splits[split]) > 0, "data", data, f"more pictures: none are left for {split}")
    return images


def found(data: str, reading: Reading | None = None, channels: int | None = None) -> Images:
    """The pictures that `data` names, in whatever parts: digits, a folder, or datasets:NAME[@REVISION][:CONFIG].

    channels: 1 for grey, 3 for colours; by default 1 for the digits and 3 otherwise.
    """
    from femixer.tasks.vision.data.sources import read_dataset, read_folder

    reading = reading or Reading()
    reading.validate()
    check(channels in (None, 1, 3), "channels", channels, "1 (grey) or 3 (colours)")
    check(data not in ("", PREFIX), "data", data, f"{DIGITS}, a folder with a folder per class, or {PREFIX}NAME")
    if data.startswith(PREFIX):
        return read_dataset(data, reading, channels or 3)
    check(not reading.streaming, "streaming", True, f"False for data={data!r}: only {PREFIX}NAME can be a stream")
    for name in ("image_column", "label_column"):
        value = getattr(reading, name)
        check(value is None, name, value, f"None for data={data!r}: only {PREFIX}NAME has columns")
    if data == DIGITS:  # whatever the folder one is in holds; ./digits is a folder
        return read_digits(reading, channels or 1)
    if not Path(data).is_dir():
        named = f"{DIGITS}, which needs no file, a folder with a folder per class, or {PREFIX}NAME[@REVISION][:CONFIG]"
        raise ValueError(f"data={data!r} is no folder; choose {named}")
    return read_folder(Path(data), reading, channels or 3)


def read_digits(reading: Reading, channels: int) -> Images:
    """1797 digits of 8 x 8 pixels and 17 levels of grey, from scikit-learn: 80 % and 20 %, of each class alike."""
    digits = require("sklearn.datasets", "vision").load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    whole = Arrays(pixels, torch.from_numpy(digits.target).long(), "digit")
    splits = divided(whole, whole.labels, reading.share)
    classes = tuple(str(name) for name in digits.target_names)
    content = pixels.tobytes()
    return Images(
        DIGITS,
        classes,
        splits,
        fingerprint(content, splits),
        channels,
        whole=fingerprint(content),
        validation=reading.share,
        one_part=True,
    )


def divided(whole: Pictures, labels: Tensor, validation: float) -> dict[str, Pictures]:
    """Pictures that come in one part."""
    rest, test = stratified(labels, TEST_SHARE, "test")
    return {**held_out(Some(whole, rest), labels[rest], validation), "test": Some(whole, test)}


def held_out(train: Pictures, labels: Tensor, validation: float) -> dict[str, Pictures]:
    """The training pictures without those for validation, and those."""
    rest, held = stratified(labels, validation, "validation")
    return {"train": Some(train, rest), "validation": Some(train, held)}


def fingerprint(content: bytes, splits: Mapping[str, Pictures] | None = None) -> str:
    """A hash of the content, and of the sizes of parts."""
    digest = hashlib.sha256(content)
    if splits is not None:
        digest.update(repr({split: len(splits[split]) for split in SPLITS if split in splits}).encode())
    return digest.hexdigest()[:16]
