"""`femixer vision eval`: a trained classifier on pictures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from femixer.models.vision.pictures import Picture
from femixer.options import check, parse
from femixer.tasks.vision.data import DIGITS, Broken, Images, Reading, found
from femixer.tasks.vision.data.pictures import Files, Joined, Pictures
from femixer.tasks.vision.data.views import Views
from femixer.tasks.vision.figures import CONFUSION, PREDICTIONS, confusion, samples, save
from femixer.tasks.vision.fit import Predictions, predicted
from femixer.tasks.vision.model import Classifier
from femixer.training import atomic

SCORES = "scores.json"
Split = Literal["train", "validation", "test", "all"]


@dataclass(frozen=True)
class Command:
    """Score a trained classifier on pictures: accuracy, loss, and figures of what it confuses.

    Writes scores.json, confusion.png and predictions.png. The classes must be among those that the model knows.
    """

    model: Path = Path("results/vision")
    """Model folder, or results folder of `femixer vision train`."""
    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    split: Split | None = None
    """Part of the pictures; by default test, but all of pictures that come in one part and that the model was not
    trained on."""
    batch: int = 256
    """Pictures that are computed at once."""
    threads: int | None = None
    """CPU threads, by default torch's choice."""
    out: Path = Path("results/vision-eval")
    """Folder of the files."""
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True)
class Renamed:
    """Pictures with the labels of the model, whose classes may have another order or be more."""

    whole: Pictures
    labels: Sequence[int]

    @property
    def blocks(self) -> Sequence[int] | None:
        return self.whole.blocks

    def __len__(self) -> int:
        return len(self.whole)

    def name(self, index: int) -> str:
        return self.whole.name(index)

    def read(self, index: int, channels: int) -> tuple[Picture, int]:
        picture, label = self.whole.read(index, channels)
        return picture, self.labels[label]


@dataclass(frozen=True)
class Chosen:
    """Pictures to evaluate a model on."""

    images: Images
    split: str
    views: Views


def choose(classifier: Classifier, data: str, reading: Reading, split: Split | None = None) -> Chosen:
    """Of pictures that the model was trained on, the parts are those of its training."""
    trained = classifier.preparation
    given = reading.validation
    share = trained.validation if given is None else given
    images = found(data, replace(reading, validation=share), trained.channels)
    seen = images.whole == trained.pictures
    allowed = f"{trained.validation}, the share with which the model was trained on these pictures, or none"
    check(not seen or given is None or images.validation == trained.validation, "validation", given, allowed)
    name = split or ("all" if images.one_part and not seen else "test")
    there = [each for each, pictures in images.splits.items() if len(pictures) > 0]
    check(name in (*there, "all"), "split", name, f"one that data={data!r} has: {', '.join(there)} or all")
    parts = [images.splits[each] for each in (there if name == "all" else [name])]
    return Chosen(images, name, Views(renamed(images, classifier.classes, Joined(parts)), trained))


def renamed(images: Images, classes: Sequence[str], pictures: Pictures) -> Pictures:
    known = {name: label for label, name in enumerate(classes)}
    strangers = [name for name in images.classes if name not in known]
    if strangers:
        told = f"it has the class {strangers[0]!r}, and the model knows {', '.join(classes)}"
        raise ValueError(f"data={images.name!r} has other classes than the model: {told}")
    return Renamed(pictures, [known[name] for name in images.classes])


def run(command: Command) -> tuple[Predictions, Views]:
    check(command.batch > 0, "batch", command.batch, "a whole number above 0")
    check(command.threads is None or command.threads > 0, "threads", command.threads, "a whole number above 0")
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    classifier = Classifier.load(command.model)
    chosen = choose(classifier, command.data, command.reading, command.split)
    images, views = chosen.images, chosen.views
    predictions = predicted(classifier.model, views, command.batch, chosen.split)
    broken = [*empty_files(images, chosen.split), *views.broken.values()]
    title = f"{command.model.name} on {images.name}, {chosen.split}"
    write(command, predictions, views, classifier.classes, title, len(broken))
    for each in broken:
        print(f"skipped: {each.name}: {each.reason}", file=sys.stderr)
    return predictions, views


def empty_files(images: Images, split: str) -> list[Broken]:
    """Of a part: those in its own folder, if it has one; which part of a divided folder they are in is not decided."""
    if split == "all":
        return [*images.broken]
    part = images.splits[split]
    own = f"{part.root}{os.sep}" if isinstance(part, Files) else None
    return [] if own is None else [each for each in images.broken if each.name.startswith(own)]


def write(
    command: Command, predictions: Predictions, views: Views, classes: Sequence[str], title: str, broken: int
) -> None:
    command.out.mkdir(parents=True, exist_ok=True)
    scores = {**predictions.scores(), "pictures": len(predictions.labels), "broken": broken}
    save(command.out / CONFUSION, confusion(predictions, classes, title))
    save(command.out / PREDICTIONS, samples(predictions, views, classes, title))
    atomic.write(command.out / SCORES, json.dumps(scores, indent=2) + "\n")
    print(f"{title}: {scores['pictures']:,} pictures, {scores['broken']} that cannot be read\n")
    print("| accuracy | top 5 | loss |\n|---:|---:|---:|")
    print(f"| {scores['top1']:.2%} | {scores['top5']:.2%} | {scores['loss']:.4f} |\n")


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "vision eval", Command())
    run(command)
    print(f"Results are in {command.out}/")
    return 0
