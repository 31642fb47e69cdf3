"""Pictures in folders, one folder per class, as ImageNet's are laid out.

root/train/CLASS/*.jpg and root/val/CLASS/*.jpg (or validation, test), or root/CLASS/*.jpg, which is then divided.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from femixer.optional import require
from femixer.options import check
from femixer.tasks.images.pictures import Files, Pictures
from femixer.tasks.images.source import NAMES, SPLITS, Broken, Images, Reading, divided, fingerprint, held_out

LAYOUT = "expected are train/CLASS/*.jpg with val/CLASS/*.jpg (or validation, test), or CLASS/*.jpg"


def read_folder(root: Path, reading: Reading, channels: int) -> Images:
    """The classes are the names of the folders of the training part, in alphabetical order."""
    parts = parts_of(root)
    classes = classes_of(parts.get("train", root))
    broken: list[Broken] = []
    found = {split: files(folder, classes, broken) for split, folder in parts.items()}
    whole = found.get("train") or files(root, classes, broken)
    if "train" not in found:
        splits = divided(whole, whole.labels, reading.validation)
    elif "test" not in found:  # the one other part is for the final test, and is not looked at before
        splits = {**held_out(whole, whole.labels, reading.validation), "test": found["validation"]}
    else:
        own = {"train": whole, "validation": found["validation"]} if "validation" in found else None
        splits = {**(own or held_out(whole, whole.labels, reading.validation)), "test": found["test"]}
    for split in SPLITS:
        check(len(splits[split]) > 0, "data", str(root), f"a folder with more pictures: none are left for {split}")
    return Images(root.resolve().name, classes, splits, hash_of(root, splits), channels, tuple(broken))


def parts_of(root: Path) -> dict[str, Path]:
    """train, validation, test -> its folder, those that there are; none if the classes are in the root itself."""
    folders = {folder.name.lower(): folder for folder in subfolders(root)}
    parts = {split: folders[name] for split, names in NAMES.items() for name in names if name in folders}
    if "train" not in parts:
        return {}
    if len(parts) == 1:
        raise ValueError(f"{parts['train']} has no val, validation or test folder beside it; {LAYOUT}")
    return parts


def classes_of(folder: Path) -> tuple[str, ...]:
    classes = tuple(sub.name for sub in subfolders(folder))
    if not classes:
        raise ValueError(f"{folder} has no folders, one per class; {LAYOUT}")
    if len(classes) == 1:
        raise ValueError(f"{folder} has one class only, {classes[0]}; a classifier needs two or more; {LAYOUT}")
    return classes


def subfolders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def files(folder: Path, classes: Sequence[str], broken: list[Broken]) -> Files:
    """The pictures of the classes in a folder; files of no bytes are added to `broken`."""
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
            if path.stat().st_size == 0:
                broken.append(Broken(str(path), "the file is empty"))
            else:
                yield path.relative_to(root).as_posix()


def hash_of(root: Path, splits: dict[str, Pictures]) -> str:
    """Of the names, which also decide the parts; a folder may be moved."""
    names = (os.path.relpath(pictures.name(i), root) for pictures in splits.values() for i in range(len(pictures)))
    return fingerprint("\n".join(names).encode(), splits)
