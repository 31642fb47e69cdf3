"""What a trained classifier makes of images: `femixer vision eval`, its scores, and `femixer vision maps`, which
patches each channel reads; and the figures of any, its curves and confusions."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from femixer.damage import check_tensor
from femixer.models.images import PatchMaps, Unreadable, as_tensor, patch_maps
from femixer.options import Count, check, check_threads, model_named, parse
from femixer.reporting.figures import BLUE, GREY, VERMILION, figure, quiet, save
from femixer.reporting.figures import label as short
from femixer.tasks.runner import told
from femixer.tasks.vision.data import ABOUT_DIGITS, DIGITS, DataSet, Files, Reading, decoded, found
from femixer.tasks.vision.data.views import Views, spread, stacked
from femixer.tasks.vision.fit import Predictions, predicted
from femixer.tasks.vision.model import Classifier
from femixer.training import atomic
from femixer.training.results import Record, check_no_run

CONFUSION, PREDICTIONS = "confusion.png", "predictions.png"
TITLE = {"fontsize": 10, "ha": "left", "parse_math": False}
"""Of what names data or classes: there a $ is a $."""
NUMBERED = 30
"""Classes up to which a confusion matrix has numbers and names."""
COLUMNS, ROWS = 8, 4
"""Of the samples."""


def curves(record: Record, title: str) -> Any:
    """Validation accuracy and loss after each epoch, of the weights and of their average, and the best."""
    drawing = figure(9.0, 3.6)
    found = record["evaluations"]
    steps = [each["step"] for each in found]
    for axes, metric, name in zip(drawing.subplots(1, 2), ("top1", "loss"), ("accuracy", "loss"), strict=True):
        scale = 100 if metric == "top1" else 1
        for prefix, label, colour in (("", "weights", BLUE), ("average_", "average of weights", GREY)):
            if prefix + metric in found[0]:
                values = [scale * each[prefix + metric] for each in found]
                axes.plot(steps, values, color=colour, linewidth=1.5, label=label)
        best = next(each for each in found if each["step"] == record["best_step"])
        chosen = best[("average_" if record["weights"] == "average" else "") + metric]
        axes.plot(best["step"], scale * chosen, "D", color=VERMILION, label="best", zorder=3)
        axes.set(xlabel="training steps", ylabel=f"validation {name}" + (" (%)" if scale == 100 else ""))
        quiet(axes)
    axes.legend(frameon=False)
    drawing.suptitle(f"{title}: test accuracy {record['top1']:.2%}", x=0.01, **TITLE)
    return drawing


def confusion(predictions: Predictions, classes: Sequence[str], title: str) -> Any:
    """Shares of each class's images that were taken for each class; numbers are of images."""
    counts = predictions.confusion()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    few = len(classes) <= NUMBERED
    side = 2.6 + 0.42 * len(classes) if few else 9.0
    drawing = figure(side + 0.6, side)
    axes = drawing.subplots()
    shown = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true")
    right = counts.diagonal().sum() / counts.sum()
    axes.set_title(f"{title}: {right:.2%} right", loc="left", **TITLE)
    if few:
        axes.set_xticks(range(len(classes)), shortened(classes), rotation=90 if long(classes) else 0, parse_math=False)
        axes.set_yticks(range(len(classes)), shortened(classes), parse_math=False)
        between = [number + 0.5 for number in range(len(classes) - 1)]
        axes.set_xticks(between, minor=True)
        axes.set_yticks(between, minor=True)
        axes.grid(which="minor", color="0.85", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
        for true, predicted in counts.nonzero().tolist():
            colour = "white" if shares[true, predicted] > 0.5 else "black"
            number = int(counts[true, predicted])
            axes.text(predicted, true, number, ha="center", va="center", fontsize=8, color=colour)
    drawing.colorbar(shown, ax=axes, label="share of the true class", shrink=0.8)
    return drawing


def samples(predictions: Predictions, views: Views, classes: Sequence[str], title: str) -> Any:
    """Wrong ones first, those that the model is surest of, and then some that are right, of all classes."""
    sure, good = predictions.logits.softmax(-1).amax(-1), predictions.chosen == predictions.labels
    wrong, right = ((good == wanted).nonzero()[:, 0] for wanted in (False, True))
    chosen = wrong[sure[wrong].argsort(descending=True)][: COLUMNS * (ROWS - 1)].tolist()
    chosen += right[spread(predictions.labels[right], COLUMNS * ROWS - len(chosen))].tolist()
    rows = -(-len(chosen) // COLUMNS)
    drawing = figure(1.25 * COLUMNS, 0.7 + 1.65 * rows)
    panels = [*drawing.subplots(rows, COLUMNS, squeeze=False).flat]
    names = shortened(classes)
    for axes in panels:
        axes.set_axis_off()
    for axes, place in zip(panels, chosen, strict=False):
        view = views.read(int(predictions.numbers[place]))
        true, predicted = int(predictions.labels[place]), int(predictions.chosen[place])
        if view is not None:
            axes.imshow(displayed(view[0]), cmap="gray", vmin=0, vmax=255)
        look = {"fontsize": 7 if long(names) else 9, "color": BLUE if true == predicted else VERMILION}
        axes.set_title(caption(names, predicted, true), **look, parse_math=False)
    drawing.suptitle(f"{title}: {len(wrong)} of {len(predictions.labels)} wrong", x=0.01, **TITLE)
    return drawing


def displayed(pixels: Tensor) -> Any:
    """[C, H, W] in uint8 as matplotlib takes it."""
    return pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy()


def shortened(names: Sequence[str]) -> list[str]:
    return [short(name, 14) for name in names]


def caption(names: Sequence[str], predicted: int, label: int | None) -> str:
    """label: the right one, None where it is not known."""
    if label is None:
        return f"taken for {names[predicted]}"
    return f"✓ {names[label]}" if predicted == label else f"✗ {names[predicted]}\nis {names[label]}"


def long(names: Sequence[str]) -> bool:
    return max(map(len, names)) > 3


SCORES = "scores.json"
Split = Literal["train", "validation", "test", "all"]


@dataclass(frozen=True)
class Evaluate:
    """Score a trained classifier on images: accuracy, loss, and figures of what it confuses.

    Writes scores.json, confusion.png and predictions.png. The classes must be among those that the model knows.
    """

    model: Path = Path("results/vision")
    """Model folder, or results folder of `femixer vision train`."""
    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    split: Split | None = None
    """Part of the images, by default test;
    of images in a single part that the model was not trained on, all."""
    batch: Count = 256
    """Images per forward pass."""
    threads: int | None = None
    """CPU threads, by default torch's choice."""
    out: Path = Path("results/vision-eval")
    """Folder of the files."""
    reading: Reading = field(default_factory=Reading)


def choose(
    classifier: Classifier, data: str, reading: Reading, split: Split | None = None
) -> tuple[DataSet, str, Views]:
    """Images to evaluate a model on: all, the part, and what the model sees of it. Of images that the model was
    trained on, the parts are those of its training."""
    trained = classifier.preparation
    given = reading.validation
    share = trained.validation if given is None else given
    dataset = found(data, replace(reading, validation=share), trained.channels)
    seen = dataset.whole == trained.pictures
    allowed = f"{trained.validation}, the share with which the model was trained on these images, or none"
    check(not seen or given is None or dataset.validation == trained.validation, "validation", given, allowed)
    name = split or ("all" if dataset.one_part and not seen else "test")
    there = [each for each, images in dataset.splits.items() if len(images) > 0]
    check(name in (*there, "all"), "split", name, f"one that data={data!r} has: {', '.join(there)} or all")
    joined: Any = ConcatDataset([dataset.splits[each] for each in (there if name == "all" else [name])])
    # The labels that the model has for the classes: it may have another order, or more.
    known = {each: label for label, each in enumerate(classifier.classes)}
    for stranger in (each for each in dataset.classes if each not in known):
        told = f"it has the class {stranger!r}, and the model knows {', '.join(known)}"
        raise ValueError(f"data={dataset.name!r} has other classes than the model: {told}")
    return dataset, name, Views(joined, trained, labels=[known[each] for each in dataset.classes])


def evaluate(args: Sequence[str]) -> int:
    command = parse(Evaluate, model_named(args), "vision eval", Evaluate())
    check_threads(command.threads)
    check_no_run(command.out)
    if command.threads is not None:
        torch.set_num_threads(command.threads)
    classifier = Classifier.load(command.model)
    told(command.data, ABOUT_DIGITS)
    dataset, split, views = choose(classifier, command.data, command.reading, command.split)
    predictions = predicted(classifier.model, views, command.batch, split)
    # Of a part the empty files in its own folder, if it has one; a divided folder's may be of any part.
    part = dataset.splits.get(split)
    own = "" if split == "all" else f"{part.root}{os.sep}" if isinstance(part, Files) else None
    broken = [each for each in dataset.broken if own is not None and each.name.startswith(own)]
    broken += views.broken.values()
    title, count = f"{command.model.name} on {dataset.name}, {split}", len(predictions.labels)
    scores = {**predictions.scores(), "pictures": count, "broken": len(broken)}
    with atomic.replacing_files(command.out) as new:
        save(confusion(predictions, classifier.classes, title), new / CONFUSION)
        save(samples(predictions, views, classifier.classes, title), new / PREDICTIONS)
        atomic.write(new / SCORES, json.dumps(scores, indent=2) + "\n")
    print(f"{title}: {count:,} images, {len(broken)} that cannot be read\n")
    print("| accuracy | top 5 | loss |\n|---:|---:|---:|")
    print(f"| {scores['top1']:.2%} | {scores['top5']:.2%} | {scores['loss']:.4f} |\n")
    for each in broken:
        print(f"skipped: {each.name}: {each.reason}", file=sys.stderr)
    print(f"Results are in {command.out}/")
    return 0


MAPS = "maps.png"
CHANNELS = 5
"""Drawn, those that differ most from the prior."""
FULL = 4
"""Times an even share of the weight, from which on the colour is full."""
COLOUR = (0.835, 0.369, 0.0)
"""Of the weights: Okabe and Ito's vermilion."""


@dataclass(frozen=True)
class Choice:
    """Which layer, head and channels to draw."""

    layer: int = -1
    """Layer, from 0; -1 is the last."""
    head: int | None = None
    """Head, from 0; by default the one whose channels differ most from its prior."""
    channels: tuple[int, ...] | None = None
    """Channels of the head, from 0; by default those that differ most from its prior."""


@dataclass(frozen=True)
class Maps:
    """Draw which patches of images the channels of a trained classifier read.

    In each row an image, what the prior of one head reads in it, and what some channels of that head read: the
    posterior, as far as the channel's temperature gate lets it through. Full colour is four times an even
    share of the weight, or more.
    """

    model: Path = Path("results/vision")
    """Model folder, or results folder of `femixer vision train`."""
    images: tuple[Path, ...] = ()
    """Files with images; without any, some of --data that `femixer vision eval` scores by default."""
    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    count: Count = 6
    """Images of --data to draw."""
    choice: Choice = field(default_factory=Choice)
    out: Path = Path("results/vision-maps.png")
    """The figure."""
    reading: Reading = field(default_factory=Reading)


def map_figure(
    classifier: Classifier, pixels: Tensor, labels: Sequence[int] | None, title: str, choice: Choice | None = None
) -> Any:
    """pixels [n, C, S, S] in uint8; labels: the right ones, where they are known."""
    choice, model = choice or Choice(), classifier.model
    given = classifier.preparation.normalized(pixels / 255).to(next(model.parameters()).device)
    maps = patch_maps(model, given, choice.layer)
    head, channels = chosen(maps, choice)
    with torch.no_grad():
        predictions = check_tensor(model(pixel_values=given).logits, f"the logits of {title}").argmax(-1).tolist()
    prior = maps.prior[:, head] if maps.prior.dim() == 4 else maps.prior[:, head].mean(1)
    weights = torch.cat([prior[:, None], maps.read[:, head, channels]], 1).cpu().numpy()
    names = ["image", f"prior of head {head}", *(f"channel {channel}" for channel in channels)]
    drawing = figure(1.5 * len(names), 0.7 + 1.6 * len(pixels))
    panels = drawing.subplots(len(pixels), len(names), squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_title(name, fontsize=9)
    for number, row in enumerate(panels):
        told = caption(shortened(classifier.classes), predictions[number], None if labels is None else labels[number])
        row[0].set_ylabel(told, fontsize=9, parse_math=False)
        for axes, own in zip(row, [None, *weights[number]], strict=True):
            draw(axes, pixels[number], own)
    layer = choice.layer % model.config.num_hidden_layers
    drawing.suptitle(f"{title}: patches read in layer {layer} (full colour: {FULL} x an even share)", x=0.01, **TITLE)
    return drawing


def chosen(maps: PatchMaps, choice: Choice) -> tuple[int, list[int]]:
    """The head and the channels to draw, by sum |read - prior| over the patches, as the mean over the images."""
    prior = maps.prior if maps.prior.dim() == 5 else maps.prior[:, :, None]
    distance = (maps.read - prior).abs().sum((-2, -1)).mean(0)
    heads, count = distance.shape
    allowed = f"a number from 0 to {heads - 1}"
    check(choice.head is None or 0 <= choice.head < heads, "head", choice.head, allowed)
    head = int(distance.mean(1).argmax()) if choice.head is None else choice.head
    if choice.channels is None:
        return head, distance[head].topk(min(CHANNELS, count)).indices.tolist()
    fits = len(choice.channels) > 0 and all(0 <= channel < count for channel in choice.channels)
    check(fits, "channels", choice.channels, f"numbers from 0 to {count - 1}")
    return head, [*choice.channels]


def draw(axes: Any, pixels: Tensor, weights: np.ndarray | None) -> None:
    """An image, pale and grey below weights [rows, columns] where there are any."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if weights is None:
        axes.imshow(displayed(pixels), cmap="gray", vmin=0, vmax=255)
        return
    height, width = pixels.shape[-2:]
    place = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow((255 - (255 - pixels.float().mean(0)) * 0.3).numpy(), cmap="gray", vmin=0, vmax=255)
    strength = np.clip(weights * weights.size / FULL, 0, 1)
    coloured = np.concatenate([np.broadcast_to(COLOUR, (*weights.shape, 3)), 0.9 * strength[..., None]], -1)
    axes.imshow(coloured, extent=place, interpolation="nearest")


def maps(args: Sequence[str]) -> int:
    command = parse(Maps, model_named(args), "vision maps", Maps())
    classifier = Classifier.load(command.model)
    preparation = classifier.preparation
    check(command.out.suffix.lower() == ".png", "out", str(command.out), "a file that ends in .png")
    labels: list[int] | None = None
    if command.images:
        seen = []
        for path in command.images:
            try:
                seen.append(as_tensor(preparation.fixed(decoded(path, preparation.channels))))
            except Unreadable as problem:
                raise ValueError(f"images={str(path)!r} cannot be read: {problem}") from problem
        pixels = torch.stack(seen)
    else:
        told(command.data, ABOUT_DIGITS)
        _, _, views = choose(classifier, command.data, command.reading)
        count = min(command.count, len(views))
        # Evenly over the images, which folders have class by class; of a stream the first.
        step = len(views) / max(count, 1) if views.blocks is None else 1
        numbers = [int(n * step) for n in range(count)]
        found = [view for number in numbers if (view := views.read(number)) is not None]
        for broken in views.broken.values():
            print(f"skipped: {broken.name}: {broken.reason}", file=sys.stderr)
        check(len(found) > 0, "data", command.data, "images of which some can be read")
        pixels, right = stacked(found)
        labels = right.tolist()
    command.out.parent.mkdir(parents=True, exist_ok=True)
    save(map_figure(classifier, pixels, labels, command.model.name, command.choice), command.out)
    print(f"The figure is {command.out}")
    return 0
