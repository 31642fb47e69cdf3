"""Pictures in folders, one folder per class, as ImageNet's are laid out.

root/train/CLASS/*.jpg and root/val/CLASS/*.jpg (or validation, test), or root/CLASS/*.jpg, which is then divided. To be
evaluated on, one of these parts will do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from femixer.optional import require
from femixer.tasks.vision.pictures import Files, Pictures
from femixer.tasks.vision.source import NAMES, Broken, Images, Reading, divided, fingerprint, held_out

HOLDING_OUT = ({"train", "validation"}, {"train", "test"})
"""Parts of which the one besides train is for the final test, and is not looked at before."""
LAYOUT = "expected are train/CLASS/*.jpg with val/CLASS/*.jpg (or validation, test), or CLASS/*.jpg"


def read_folder(root: Path, reading: Reading, channels: int) -> Images:
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
    if train is not None:
        check_classes(train, classes)
    names = [os.path.relpath(pictures.name(i), root) for pictures in splits.values() for i in range(len(pictures))]
    return Images(
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


def arranged(parts: Mapping[str, Files], share: float) -> dict[str, Pictures]:
    """train, validation and test, of those that there are."""
    if {*parts} == {"validation"}:
        return {"test": parts["validation"]}
    if {*parts} not in HOLDING_OUT:
        return {**parts}
    train, (other,) = parts["train"], (part for split, part in parts.items() if split != "train")
    return {**held_out(train, train.labels, share), "test": other}


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
    """The pictures of the classes in a folder; files that hold nothing are added to `broken`."""
    strangers = [sub.name for sub in subfolders(folder) if sub.name not in classes]
    if strangers:
        known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise ValueError(
            f"{folder / strangers[0]} is a class that the training pictures do not have; they have {known}"
        )
    paths, labels = [], []
    for label, name in enumerate(classes):
        own = [*readable(folder / name, folder, broken)] if (folder / name).is_dir() else []
        paths += own
        labels += [label] * len(own)
    if not paths:
        raise ValueError(f"{folder} has no pictures in its folders {', '.join(classes[:5])}; {LAYOUT}")
    return Files(folder, paths, torch.tensor(labels))


def check_classes(pictures: Files, classes: Sequence[str]) -> None:
    """Raise a ValueError that names a class without pictures."""
    for label, name in enumerate(classes):
        if not (pictures.labels == label).any():
            raise ValueError(f"{pictures.root / name} has no pictures; a class must have some, or no folder")


def readable(folder: Path, root: Path, broken: list[Broken]) -> Iterator[str]:
    """Files below a class's folder whose ending is one of Pillow's, by name, as paths from the root."""
    image = require("PIL.Image", "vision")
    image.init()
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place) / name
            if path.suffix.lower() not in image.EXTENSION or name.startswith("."):
                continue
            try:
                problem = "the file is empty" if path.stat().st_size == 0 else None
            except OSError as error:  # a link to nowhere
                problem = error.strerror or str(error)
            if problem:
                broken.append(Broken(str(path), problem))
            else:
                yield path.relative_to(root).as_posix()
