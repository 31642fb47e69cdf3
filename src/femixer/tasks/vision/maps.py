"""`femixer vision maps`: which patches each channel of a trained classifier reads."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from femixer.damage import check_tensor
from femixer.models.pictures import PatchMaps, Unreadable, as_tensor, patch_maps
from femixer.options import check, check_positive, model_named, parse
from femixer.reporting.figures import figure, save
from femixer.tasks.runner import told
from femixer.tasks.vision.data import ABOUT_DIGITS, DIGITS, Reading, decoded
from femixer.tasks.vision.data.views import stacked
from femixer.tasks.vision.evaluate import TITLE, choose, displayed, shortened
from femixer.tasks.vision.model import Classifier

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
class Command:
    """Draw which patches of pictures the channels of a trained classifier read.

    In each row a picture, what the prior of one head reads in it, and what some channels of that head read: the
    posterior, as far as the channel's temperature gate lets it through. Full colour is four times an even
    share of the weight, or more.
    """

    model: Path = Path("results/vision")
    """Model folder, or results folder of `femixer vision train`."""
    images: tuple[Path, ...] = ()
    """Files with pictures; without any, some of --data that `femixer vision eval` scores by default."""
    data: str = DIGITS
    """A folder with a folder per class (train/ and val/ in it, or one that is divided), datasets:NAME, or digits."""
    count: int = 6
    """Pictures of --data to draw."""
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
    names = ["picture", f"prior of head {head}", *(f"channel {channel}" for channel in channels)]
    drawing = figure(1.5 * len(names), 0.7 + 1.6 * len(pixels))
    panels = drawing.subplots(len(pixels), len(names), squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_title(name, fontsize=9)
    for number, row in enumerate(panels):
        told = caption(classifier, predictions[number], None if labels is None else labels[number])
        row[0].set_ylabel(told, fontsize=9, parse_math=False)
        for axes, own in zip(row, [None, *weights[number]], strict=True):
            draw(axes, pixels[number], own)
    layer = choice.layer % model.config.num_hidden_layers
    drawing.suptitle(f"{title}: patches read in layer {layer} (full colour: {FULL} x an even share)", x=0.01, **TITLE)
    return drawing


def chosen(maps: PatchMaps, choice: Choice) -> tuple[int, list[int]]:
    """The head and the channels to draw, by sum |read - prior| over the patches, as the mean over the pictures."""
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
    """A picture, pale and grey below weights [rows, columns] where there are any."""
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


def caption(classifier: Classifier, predicted: int, label: int | None) -> str:
    names = shortened(classifier.classes)
    if label is None:
        return f"taken for {names[predicted]}"
    return f"✓ {names[label]}" if predicted == label else f"✗ {names[predicted]}\nis {names[label]}"


def run(command: Command) -> None:
    classifier = Classifier.load(command.model)
    preparation = classifier.preparation
    check_positive(count=command.count)
    check(command.out.suffix.lower() == ".png", "out", str(command.out), "a file that ends in .png")
    labels: list[int] | None = None
    if command.images:
        pixels = torch.stack(
            [as_tensor(preparation.fixed(opened(path, preparation.channels))) for path in command.images]
        )
    else:
        told(command.data, ABOUT_DIGITS)
        views = choose(classifier, command.data, command.reading).views
        count = min(command.count, len(views))
        # Evenly over the pictures, which folders have class by class; of a stream the first.
        step = len(views) / max(count, 1) if views.pictures.blocks is None else 1
        numbers = [int(n * step) for n in range(count)]
        found = [view for number in numbers if (view := views.read(number)) is not None]
        for broken in views.broken.values():
            print(f"skipped: {broken.name}: {broken.reason}", file=sys.stderr)
        check(len(found) > 0, "data", command.data, "pictures of which some can be read")
        pixels, right = stacked(found)
        labels = right.tolist()
    command.out.parent.mkdir(parents=True, exist_ok=True)
    save(map_figure(classifier, pixels, labels, command.model.name, command.choice), command.out)


def opened(path: Path, channels: int) -> Any:
    try:
        return decoded(path, channels)
    except Unreadable as problem:
        raise ValueError(f"images={str(path)!r} cannot be read: {problem}") from problem


def main(args: Sequence[str]) -> int:
    command = parse(Command, model_named(args), "vision maps", Command())
    run(command)
    print(f"The figure is {command.out}")
    return 0
