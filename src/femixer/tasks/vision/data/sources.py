"""Where images come from: folders with a folder per class, and data sets of the Hugging Face hub, streamed or not."""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from femixer.models.images import Image, Unreadable
from femixer.optional import require
from femixer.options import check
from femixer.tasks.vision.data import (
    NAMES,
    PREFIX,
    SPLITS,
    Broken,
    DataSet,
    Files,
    Images,
    Item,
    Reading,
    decoded,
    divided,
    fingerprint,
    held_out,
    some,
)

HOLDING_OUT = ({"train", "validation"}, {"train", "test"})
"""Parts of which the one besides train is for the final test, and is not looked at before."""
LAYOUT = "expected are train/CLASS/*.jpg with val/CLASS/*.jpg (or validation, test), or CLASS/*.jpg"


def read_folder(root: Path, reading: Reading, channels: int) -> DataSet:
    """The classes are the names of the folders of the training part, if there is one, in alphabetical order."""
    parts = parts_of(root)
    learned = [parts["train"]] if "train" in parts else [*parts.values()] or [root]
    classes = tuple(sorted({name for folder in learned for name in classes_of(folder)}))
    broken: list[Broken] = []
    parted = {split: files(folder, classes, broken) for split, folder in parts.items()}
    if parts:
        train, splits = parted.get("train"), arranged(parted, reading.share)
    else:
        train = files(root, classes, broken)
        splits = divided(train, train.labels, reading.share)
    for label, name in enumerate(classes):
        if train is not None and not (train.labels == label).any():
            raise ValueError(f"{train.root / name} has no images; a class must have some, or no folder")
    names = [os.path.relpath(each[i].name, root) for each in splits.values() for i in range(len(each))]
    return DataSet(
        root.resolve().name,
        classes,
        splits,
        fingerprint("\n".join(names).encode(), splits),  # of names, which decide the parts; a folder may be moved
        channels,
        tuple(broken),
        whole=fingerprint("\n".join(sorted(names)).encode()),
        validation=reading.share if not parts or {*parts} in HOLDING_OUT else None,
        one_part=not parts or {*parts} == {"train"},
    )


def arranged(parts: Mapping[str, Any], share: float) -> dict[str, Images]:
    """train, validation and test, of those that there are."""
    if {*parts} == {"validation"}:
        return {"test": parts["validation"]}
    if {*parts} not in HOLDING_OUT:
        return {**parts}
    train, (other,) = parts["train"], (part for split, part in parts.items() if split != "train")
    if not isinstance(train, Stream):
        return {**held_out(train, train.labels, share), "test": other}
    # The labels of a stream are not known beforehand: every so many rows, instead of a share of each class.
    every = max(2, round(1 / share), -(-len(train) // OF_A_STREAM))
    numbers = torch.arange(len(train))
    held = numbers % every == every - 1
    return {"train": some(train, numbers[~held]), "validation": some(train, numbers[held]), "test": other}


def parts_of(root: Path) -> dict[str, Path]:
    """train, validation, test -> its folder, those that there are; none if the classes are in the root itself.

    Without train, `test` may be the name of a class, beside others.
    """
    folders = {folder.name.lower(): folder for folder in subfolders(root)}
    parts = {split: folders[name] for split, names in NAMES.items() for name in names if name in folders}
    return parts if "train" in parts or len(parts) == len(folders) else {}


def classes_of(folder: Path) -> tuple[str, ...]:
    classes = tuple(sub.name for sub in subfolders(folder))
    if not classes:
        raise ValueError(f"{folder} has no folders, one per class; {LAYOUT}")
    return classes


def subfolders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def files(folder: Path, classes: Sequence[str], broken: list[Broken]) -> Files:
    """The images of the classes in a folder; files that hold nothing are added to `broken`."""
    strangers = [sub.name for sub in subfolders(folder) if sub.name not in classes]
    if strangers:
        known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise ValueError(f"{folder / strangers[0]} is a class that the training images do not have; they have {known}")
    paths, labels = [], []
    for label, name in enumerate(classes):
        own = [*readable(folder / name, folder, broken)] if (folder / name).is_dir() else []
        paths += own
        labels += [label] * len(own)
    if not paths:
        raise ValueError(f"{folder} has no images in its folders {', '.join(classes[:5])}; {LAYOUT}")
    return Files(folder, paths, torch.tensor(labels))


def readable(folder: Path, root: Path, broken: list[Broken]) -> Iterator[str]:
    """Files below a class's folder whose ending is one of Pillow's, by name, as paths from the root."""
    pil = require("PIL.Image", "vision")
    pil.init()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place) / name
            if path.suffix.lower() not in pil.EXTENSION or name.startswith("."):
                continue
            try:
                problem = "the file is empty" if path.stat().st_size == 0 else None
            except OSError as error:  # a link to nowhere
                problem = error.strerror or str(error)
            if problem:
                broken.append(Broken(str(path), problem))
            else:
                yield path.relative_to(root).as_posix()


OF_A_STREAM = 1_500
"""Rows of a stream that are held out at most: of 224 x 224 pixels, so many stay in memory, and the stream need not be
read again for each evaluation."""
TEXTS = ("string", "large_string")
LABELS = ("label", "labels", "fine_label", "target", "class")
"""Of the column of labels, where the type does not tell."""


@dataclass(frozen=True)
class Columns:
    image: str
    label: str
    classes: tuple[str, ...]
    """Names of the labels 0, 1, ..."""
    texts: Mapping[str, int] | None = None
    """Label -> its number, where labels are names themselves."""

    def read(self, row: Mapping[str, Any], channels: int) -> tuple[Image, int]:
        """Of an undecoded row."""
        label, content = self.number(row[self.label]), row[self.image]
        if content is None:
            raise Unreadable("there is none")
        given = content["bytes"] if content.get("bytes") is not None else Path(content["path"] or "")
        return decoded(given, channels), label

    def number(self, label: Any) -> int:
        """Of a class, by the label as it is in the data."""
        known = range(len(self.classes)) if self.texts is None else self.texts
        if label not in known:
            allowed = f"0 to {len(self.classes) - 1}" if self.texts is None else ", ".join(self.classes)
            raise ValueError(f"{self.label}={label!r} is not allowed; choose one of {allowed}")
        return int(known[label])


@dataclass(frozen=True)
class Stored(Images):
    """The rows of a data set that is on the disk."""

    rows: Any
    columns: Columns
    title: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        return Item(f"{self.title} row {index}", lambda channels: self.columns.read(self.rows[index], channels))

    @functools.cached_property
    def labels(self) -> Tensor:
        found = []
        for row, label in enumerate(self.rows[self.columns.label]):
            try:
                found.append(self.columns.number(label))
            except ValueError as error:
                raise ValueError(f"{self[row].name}: {error}") from None
        return torch.tensor(found)


@dataclass
class Stream(Images):
    """The rows of a data set as it comes: read block by block, from the beginning where an earlier one is asked for."""

    rows: Any
    columns: Columns
    title: str
    count: int
    buffer: int
    """Rows of a block."""
    block: list[Any] = field(default_factory=list)
    number: int = -1
    """Of the block that is held."""
    coming: Iterator[Any] | None = None

    @property
    def blocks(self) -> Sequence[int]:
        return [min(self.buffer, self.count - begin) for begin in range(0, self.count, self.buffer)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        return Item(f"{self.title} row {index}", lambda channels: self.columns.read(self._row(index), channels))

    def _row(self, index: int) -> Any:
        number, place = divmod(index, self.buffer)
        if number != self.number:
            self._hold(number)
        check(place < len(self.block), "data", self.title, f"a data set of {self.count} rows, as it says it has")
        return self.block[place]

    def _hold(self, number: int) -> None:
        skipped = number - self.number - 1
        if self.coming is None or skipped < 0:
            self.coming, skipped = iter(self.rows), number
        self.block = []  # before the next one is there: two would be twice the memory
        self.block = [*itertools.islice(self.coming, skipped * self.buffer, (skipped + 1) * self.buffer)]
        self.number = number


def read_dataset(data: str, reading: Reading, channels: int) -> DataSet:
    """datasets:NAME[@REVISION][:CONFIG]; its parts are those called train, validation and test."""
    found = opened(data, reading.streaming)
    names = {split: name for split, known in NAMES.items() for name in found if name.lower() in known}
    if not names:
        raise ValueError(f"data={data!r} has no part called train, validation or test, but {', '.join(found)}")
    if "train" not in names:  # to be evaluated on: one part, whose labels are known
        told = (name for split in ("test", "validation") if (name := names.get(split)) is not None)
        shown = (name for name in told if not hidden(found[name], columns_of(found[name], data, reading)))
        names = {"test": next(shown, "")}
        if not names["test"]:
            raise ValueError(f"data={data!r} has no part called train, and the labels of the others are hidden")
    columns = columns_of(found[names.get("train") or names["test"]], data, reading)
    parts = {
        split: part(found[name], columns, f"{data} {name}", reading)
        for split, name in names.items()
        if split == "train" or not hidden(found[name], columns)
    }
    if {*parts} == {"train"}:
        if reading.streaming:
            raise ValueError("a stream must have a part called test or validation; without --streaming one is cut off")
        splits = divided(parts["train"], parts["train"].labels, reading.share)
    else:
        splits = arranged(parts, reading.share)
    address = data.removeprefix(PREFIX)
    content = repr((address, columns.classes)).encode()
    for images in parts.values() if not reading.streaming else ():
        content += images.labels.numpy().tobytes()
    name = Path(address.partition(":")[0].partition("@")[0]).name
    return DataSet(
        name,
        columns.classes,
        splits,
        fingerprint(content, splits),
        channels,
        whole=fingerprint(content),
        validation=None if {*SPLITS} <= {*parts} or "train" not in parts else reading.share,
        one_part={*parts} == {"train"},
    )


def opened(data: str, streaming: bool) -> Mapping[str, Any]:
    """name of a part -> its rows."""
    name, _, config = data.removeprefix(PREFIX).partition(":")
    name, _, revision = name.partition("@")
    datasets = require("datasets", "vision")
    try:
        return datasets.load_dataset(name, config or None, revision=revision or None, streaming=streaming)
    except Exception as error:  # the hub, the builder and the file system each raise their own
        raise ValueError(f"data={data!r} cannot be opened: {error}") from error


def hidden(rows: Any, columns: Columns) -> bool:
    """Are the labels kept from us, as those of ImageNet's test part are?"""
    first = next(iter(rows.select_columns([columns.label])), None)
    return first is not None and first[columns.label] in (None, -1)


def part(rows: Any, columns: Columns, title: str, reading: Reading) -> Any:
    """Stored, or a Stream."""
    # Undecoded: what is no image must not end the reading of the others.
    rows = rows.select_columns([columns.image, columns.label])
    rows = rows.cast_column(columns.image, require("datasets", "vision").Image(decode=False))
    if not reading.streaming:
        return Stored(rows, columns, title)
    known = (rows.info.splits or {}).get(str(rows.split)) if rows.info is not None else None
    count = known.num_examples if known is not None and known.num_examples else sum(1 for _ in rows)
    return Stream(rows, columns, title, count, reading.buffer)


def columns_of(rows: Any, data: str, reading: Reading) -> Columns:
    """Found by their types, and by their names where that leaves a choice."""
    datasets, features = require("datasets", "vision"), rows.features
    if features is None:
        raise ValueError(f"data={data!r} does not say which columns it has; read it without --streaming")
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    image = reading.image_column or (images[0] if images else None)
    check(image in features, "image_column", image, f"a column of images, out of {', '.join(features)}")
    typed = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    usual = [name for name in LABELS if name in features]
    label = reading.label_column or (typed[0] if len(typed) == 1 else next(iter(usual), None))
    check(label in features, "label_column", label, f"a column of labels, out of {', '.join(features)}")
    kind = features[label]
    if hasattr(kind, "names"):
        return Columns(str(image), str(label), tuple(kind.names))
    known = kind.dtype.startswith(("int", "uint")) or kind.dtype in TEXTS
    fits = known and hasattr(rows, "__len__")
    allowed = "a column of ClassLabels, or (not as a stream) of whole numbers 0, 1, ... or names"
    check(fits, "label_column", label, allowed)
    found = {each for each in rows[label] if each is not None}
    if kind.dtype not in TEXTS:
        return Columns(str(image), str(label), tuple(map(str, range(max(found) + 1))))
    classes = tuple(sorted(found))
    return Columns(str(image), str(label), classes, {name: n for n, name in enumerate(classes)})
