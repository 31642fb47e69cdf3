"""Images that can be read one by one (files, arrays, several or some of them as one), how a model takes them, and
where they are by their address: a folder with a folder per class, a data set of the hub, or the digits; their parts.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from femixer.damage import check_fields, read_json
from femixer.models.images import FEMImageProcessor, Image, Unreadable, converted, middle, upright
from femixer.optional import require
from femixer.options import Count, Rule, check, check_all, check_options
from femixer.training import generator


def decoded(content: Path | bytes, channels: int) -> Image:
    """The image in a file, upright (as EXIF says), of 1 or 3 channels; transparent parts are white."""
    pil = require("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, large sizes: what matters is whether there are pixels
            with pil.open(io.BytesIO(content) if isinstance(content, bytes) else content) as file:
                return upright(file, channels)
    except Exception as error:  # each format's reader has its own
        raise Unreadable(reason(content, error)) from error


def reason(content: Path | bytes, error: Exception) -> str:
    """Why an image cannot be read, in a line."""
    try:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
    except OSError as problem:
        return problem.strerror or str(problem)
    if size == 0:
        return "the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":
        return "not a format that Pillow knows"
    return " ".join(str(error).split()) or type(error).__name__


class Item(NamedTuple):
    """Of a source: where to find it, for people; and how to read it, with 1 or 3 channels: the image and its label,
    or `Unreadable`."""

    name: str
    read: Callable[[int], tuple[Image, int]]


class Images(Dataset[Item]):
    """N images in a fixed order: a source, or by torch's Subset and ConcatDataset some of one, or several."""

    @abstractmethod
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Arrays(Images):
    """Grey images in memory: pixels [N, H, W] in uint8, labels [N]."""

    pixels: np.ndarray
    labels: Tensor
    title: str

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Item:
        def read(channels: int) -> tuple[Image, int]:
            image = require("PIL.Image", "vision").fromarray(self.pixels[index])
            return converted(image, channels), int(self.labels[index])

        return Item(f"{self.title} {index}", read)


@dataclass(frozen=True)
class Files(Images):
    """One file per image, below `root`; labels [N]."""

    root: Path
    paths: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Item:
        path = self.root / self.paths[index]
        return Item(str(path), lambda channels: (decoded(path, channels), int(self.labels[index])))


def blocks_of(images: Any) -> Sequence[int] | None:
    """Sizes of the blocks, one after the other, within which any order is read well; None: one block of all."""
    if isinstance(images, ConcatDataset):
        parts: Any = images.datasets
        each = [(blocks_of(part), len(part)) for part in parts]
        whole = all(own is None for own, _ in each)
        return None if whole else [size for own, count in each for size in own or [count]]
    if not isinstance(images, Subset):
        return getattr(images, "blocks", None)
    sizes = blocks_of(images.dataset)
    if sizes is None:
        return None
    ends = torch.tensor([*sizes]).cumsum(0)
    block = torch.bucketize(torch.tensor(images.indices), ends, right=True)
    return torch.bincount(block, minlength=len(ends)).tolist()  # without the images that are left out


def some(images: Images, numbers: Tensor) -> Any:
    """Those with these numbers [n], which rise."""
    return Subset(images, numbers.tolist())


PREPARATION = "preparation.json"
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of its channels, with pixels in [0, 1]: used for all images in colour, as is usual."""
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

    def fixed(self, image: Image) -> Image:
        """The view that evaluation has of an image."""
        return middle(image, self.size, self.crop)

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
        ranges = {"size": (1, 2**14), "channels": (1, 64), "crop": (1e-3, 1.0), "validation": (1e-6, 0.999999)}
        for name, (least, most) in ranges.items():
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
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[torch.cat([own[: counts[label]] for label, own in members.items()])] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


DIGITS = "digits"
ABOUT_DIGITS = "the 1,797 handwritten digits of scikit-learn"
PREFIX = "datasets:"
TEST_SHARE = 0.2
"""Of the images, where they come in one part."""
HELD_OUT = 0.1
"""Of the training images, where they have no validation part."""
SPLITS = ("train", "validation", "test")
NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""How the parts are called, by folders and data sets."""


Between = Annotated[float, Rule("a share between 0 and 1", lambda x: 0 < x < 1)]


@dataclass(frozen=True)
class Reading:
    """How images are read."""

    validation: Between | None = None
    """Share of the training images of each class to hold out, if the data have no validation part of their own.
    By default 0.1, or what the model to be evaluated was trained with."""
    image_column: str | None = None
    """Column of the images of a `datasets:` data set, by default the first one of its image type."""
    label_column: str | None = None
    """Column of the labels, by default the only one of its class type, or the one called label or fine_label."""
    streaming: bool = False
    """Read a `datasets:` data set as it comes instead of keeping a copy."""
    buffer: Count = 10_000
    """Images of a stream that are shuffled together."""

    @property
    def share(self) -> float:
        """That is held out."""
        return HELD_OUT if self.validation is None else self.validation


@dataclass(frozen=True)
class Broken:
    """An image that cannot be read."""

    name: str
    reason: str


@dataclass(frozen=True)
class DataSet:
    """Images in their parts."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Images]
    fingerprint: str
    """A hash of what decides which images are where; not of the pixels of files."""
    channels: int
    broken: Sequence[Broken] = field(default_factory=tuple)
    """What was seen to be no image without reading it."""
    whole: str = ""
    """A hash of the images, however they are divided."""
    validation: float | None = None
    """Share of the training images that is held out; None: the data have a validation part, or no training part."""
    one_part: bool = False
    """Do they come in one part, which is divided here?"""

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(images) for split, images in self.splits.items()}


def read(data: str, reading: Reading | None = None, channels: int | None = None) -> DataSet:
    """The images that `data` names, in the three parts that a training needs."""
    dataset = found(data, reading, channels)
    if len(dataset.classes) < 2:
        raise ValueError(f"data={data!r} has one class only, {dataset.classes[0]}; a classifier needs two or more")
    if "train" not in dataset.splits or "test" not in dataset.splits:
        there = " and ".join(dataset.splits)
        needed = "a training and another part (val, validation or test), or all images in one"
        raise ValueError(f"data={data!r} has only a part for {there}; training needs {needed}")
    for split in SPLITS:
        check(len(dataset.splits[split]) > 0, "data", data, f"more images: none are left for {split}")
    return dataset


def found(data: str, reading: Reading | None = None, channels: int | None = None) -> DataSet:
    """The images that `data` names, in whatever parts: digits, a folder, or datasets:NAME[@REVISION][:CONFIG].

    channels: 1 for grey, 3 for colours; by default 1 for the digits and 3 otherwise.
    """
    from femixer.tasks.vision.data.sources import read_dataset, read_folder

    reading = reading or Reading()
    check_options(reading)
    check(channels in (None, 1, 3), "channels", channels, "1 (grey) or 3 (colours)")
    named = f"{DIGITS}, which needs no file, a folder with a folder per class, or {PREFIX}NAME[@REVISION][:CONFIG]"
    check(data not in ("", PREFIX), "data", data, named)
    if data.startswith(PREFIX):
        return read_dataset(data, reading, channels or 3)
    check(not reading.streaming, "streaming", True, f"False for data={data!r}: only {PREFIX}NAME can be a stream")
    none = Rule(f"None for data={data!r}: only {PREFIX}NAME has columns", lambda given: False)
    check_all(reading, none, "image_column", "label_column")
    if data == DIGITS:  # whatever the folder one is in holds; ./digits is a folder
        return read_digits(reading, channels or 1)
    if not Path(data).is_dir():
        raise ValueError(f"data={data!r} is no folder; choose {named}")
    return read_folder(Path(data), reading, channels or 3)


def read_digits(reading: Reading, channels: int) -> DataSet:
    """1797 digits of 8 x 8 pixels and 17 levels of grey, from scikit-learn: 80 % and 20 %, of each class alike."""
    digits = require("sklearn.datasets", "vision").load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    whole = Arrays(pixels, torch.from_numpy(digits.target).long(), "digit")
    splits = divided(whole, whole.labels, reading.share)
    classes, content = tuple(map(str, digits.target_names)), pixels.tobytes()
    about: dict[str, Any] = {"whole": fingerprint(content), "validation": reading.share, "one_part": True}
    return DataSet(DIGITS, classes, splits, fingerprint(content, splits), channels, **about)


def divided(whole: Images, labels: Tensor, validation: float) -> dict[str, Images]:
    """Images that come in one part."""
    rest, test = stratified(labels, TEST_SHARE, "test")
    return {**held_out(some(whole, rest), labels[rest], validation), "test": some(whole, test)}


def held_out(train: Images, labels: Tensor, validation: float) -> dict[str, Images]:
    """The training images without those for validation, and those."""
    rest, held = stratified(labels, validation, "validation")
    return {"train": some(train, rest), "validation": some(train, held)}


def fingerprint(content: bytes, splits: Mapping[str, Images] | None = None) -> str:
    """A hash of the content, and of the sizes of parts."""
    digest = hashlib.sha256(content)
    if splits is not None:
        digest.update(repr({split: len(splits[split]) for split in SPLITS if split in splits}).encode())
    return digest.hexdigest()[:16]
