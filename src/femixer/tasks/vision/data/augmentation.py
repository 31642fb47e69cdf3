"""Augmentation of training images: what can be done to one (crops, flips, the operations of RandAugment, jitter),
what is done, and in which order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from femixer.models.images import Image, middle, resized
from femixer.optional import require
from femixer.options import BelowOne, Count, NotNegative, Rule, Share
from femixer.tasks.vision.data import Preparation


def uniform(generator: Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def normal(generator: Generator, mean: float, deviation: float) -> float:
    return mean + deviation * torch.randn((), generator=generator, dtype=torch.float64).item()


def integer(generator: Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=generator))


def sign(generator: Generator) -> int:
    return 1 - 2 * integer(generator, 2)


def beta(generator: Generator, alpha: float) -> float:
    """Of the distribution Beta(alpha, alpha), which torch draws only from its global generator."""
    return float(np.random.default_rng(integer(generator, 2**62)).beta(alpha, alpha))


ASPECTS = (3 / 4, 4 / 3)
"""Width / height of random crops (Szegedy et al., 2015)."""
TRIES = 10


def random_crop(image: Image, size: int, smallest: float, generator: Generator) -> Image:
    """A box of `smallest` to all of the image's area, of random aspect and place, as size x size pixels."""
    width, height = image.size
    return resized(image, size, size, random_box(width, height, smallest, generator))


def random_box(width: int, height: int, smallest: float, generator: Generator) -> tuple[int, int, int, int]:
    """Left, top, right, bottom; the middle, of an allowed aspect, if no box that was drawn fits."""
    for _ in range(TRIES):
        area = width * height * uniform(generator, smallest, 1)
        aspect = math.exp(uniform(generator, *map(math.log, ASPECTS)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = integer(generator, width - w + 1), integer(generator, height - h + 1)
            return left, top, left + w, top + h
    aspect = min(max(width / height, ASPECTS[0]), ASPECTS[1])
    w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def random_flip(image: Image, probability: float, generator: Generator) -> Image:
    """Left and right exchanged."""
    if uniform(generator) >= probability:
        return image
    return require("PIL.ImageOps", "vision").mirror(image)


Operation = Callable[[Image, float, Generator], Image]

FILL = (124, 116, 104)
"""What comes into view where an image is moved: the mean colour of ImageNet."""
TURN, SHEAR, SHIFT, CHANGE, BITS, ADDED = 30.0, 0.3, 0.45, 0.9, 4, 110
DARKEST = 0.1
"""Smallest factor of a change."""


def fill(image: Image) -> tuple[int, ...]:
    return FILL if image.mode == "RGB" else (round(sum(FILL) / 3),)


def interpolation(generator: Generator) -> int:
    """Bilinear or bicubic, one as likely as the other."""
    resampling = require("PIL.Image", "vision").Resampling
    return (resampling.BILINEAR, resampling.BICUBIC)[integer(generator, 2)]


def plain(name: str) -> Operation:
    """One of Pillow's operations that knows no strength."""

    def operation(image: Image, strength: float, generator: Generator) -> Image:
        return getattr(require("PIL.ImageOps", "vision"), name)(image)

    return operation


def rotate(image: Image, strength: float, generator: Generator) -> Image:
    angle = sign(generator) * strength * TURN
    return image.rotate(angle, resample=interpolation(generator), fillcolor=fill(image))


def posterize(image: Image, strength: float, generator: Generator) -> Image:
    """At full strength no bit is left, as published, and which Pillow's own function refuses."""
    dropped = 8 - BITS + int(strength * BITS)
    return each_level(image, lambda level: level >> dropped << dropped)


def solarize(image: Image, strength: float, generator: Generator) -> Image:
    return require("PIL.ImageOps", "vision").solarize(image, 256 - int(strength * 256))


def solarize_add(image: Image, strength: float, generator: Generator) -> Image:
    added = int(strength * ADDED)
    return each_level(image, lambda level: min(255, level + added) if level < 128 else level)


def each_level(image: Image, change: Callable[[int], int]) -> Image:
    return image.point([change(level) for level in range(256)] * len(image.getbands()))


def enhanced(name: str) -> Operation:
    """One of Pillow's enhancers, with a factor on either side of 1."""

    def operation(image: Image, strength: float, generator: Generator) -> Image:
        factor = max(DARKEST, 1 + sign(generator) * strength * CHANGE)
        return getattr(require("PIL.ImageEnhance", "vision"), name)(image).enhance(factor)

    return operation


def moved(matrix: Callable[[float, Image], tuple[float, ...]]) -> Operation:
    """The pixel (x, y) shows what was at (a x + b y + c, d x + e y + f) of a matrix of the strength, of either sign."""

    def operation(image: Image, strength: float, generator: Generator) -> Image:
        affine, found = require("PIL.Image", "vision").Transform.AFFINE, matrix(sign(generator) * strength, image)
        return image.transform(image.size, affine, found, resample=interpolation(generator), fillcolor=fill(image))

    return operation


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": plain("autocontrast"),
    "Equalize": plain("equalize"),
    "Invert": plain("invert"),
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "Color": enhanced("Color"),
    "Contrast": enhanced("Contrast"),
    "Brightness": enhanced("Brightness"),
    "Sharpness": enhanced("Sharpness"),
    "ShearX": moved(lambda strength, _: (1, strength * SHEAR, 0, 0, 1, 0)),
    "ShearY": moved(lambda strength, _: (1, 0, 0, strength * SHEAR, 1, 0)),
    "TranslateX": moved(lambda strength, image: (1, 0, strength * SHIFT * image.width, 0, 1, 0)),
    "TranslateY": moved(lambda strength, image: (1, 0, 0, 0, 1, strength * SHIFT * image.height)),
}


LAYERS = 2
"""Operations of an image."""
PROBABILITY = 0.5
"""Of each of them."""
DEVIATION = 0.5
"""Of the magnitude, which is normal; its range is 0 to FULL."""
FULL = 10.0
JITTERED = ("Brightness", "Contrast", "Color")


def randaugment(image: Image, magnitude: float, generator: Generator) -> Image:
    """Two operations, each of any of the fifteen and each left out half of the time."""
    names = [*OPERATIONS]
    for _ in range(LAYERS):
        operation = OPERATIONS[names[integer(generator, len(names))]]
        strength = min(max(normal(generator, magnitude, DEVIATION), 0.0), FULL) / FULL
        if uniform(generator) < PROBABILITY:
            image = operation(image, strength, generator)
    return image


def jitter(image: Image, strength: float, generator: Generator) -> Image:
    """Brightness, contrast and saturation times factors of 1 - strength to 1 + strength, in random order."""
    enhance, names = require("PIL.ImageEnhance", "vision"), [*JITTERED]
    while names:
        name = names.pop(integer(generator, len(names)))
        factor = uniform(generator, max(0.0, 1 - strength), 1 + strength)
        image = getattr(enhance, name)(image).enhance(factor)
    return image


def move(pixels: Tensor, shift: float, turn: float, generator: Generator) -> Tensor:
    """pixels [B, C, H, W] in [0, 1], each shifted by up to `shift` pixels and turned by up to `turn` degrees, bilinear.

    What comes into view is 0.
    """
    if shift == 0 and turn == 0:
        return pixels
    count, _, height, width = pixels.shape
    drawn = 2 * torch.rand(count, 3, generator=generator) - 1
    angle = drawn[:, 0] * math.radians(turn)
    cos, sin = angle.cos(), angle.sin()
    across, down = drawn[:, 1] * shift * 2 / width, drawn[:, 2] * shift * 2 / height  # a side is 2 long here
    rows = [torch.stack([cos, -sin * height / width, across], -1), torch.stack([sin * width / height, cos, down], -1)]
    grid = F.affine_grid(torch.stack(rows, 1), [*pixels.shape], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


AREAS = (0.02, 1 / 3)
"""Of the image."""
FLATTEST = 0.3
"""Height / width of a box is between this and its inverse."""


def erase(pixels: Tensor, probability: float, generator: Generator) -> Tensor:
    """pixels [B, C, H, W], normalized: each image with this probability gets a box of standard normal noise."""
    if probability == 0:
        return pixels
    pixels = pixels.clone()
    channels, height, width = pixels.shape[1:]
    for image in pixels:
        if uniform(generator) < probability:
            top, left, h, w = erased_box(height, width, generator)
            image[:, top : top + h, left : left + w] = torch.randn(channels, h, w, generator=generator)
    return pixels


def erased_box(height: int, width: int, generator: Generator) -> tuple[int, int, int, int]:
    """Top, left, height, width of a box that fits; nothing if none that was drawn does."""
    for _ in range(TRIES):
        area = height * width * uniform(generator, *AREAS)
        aspect = math.exp(uniform(generator, math.log(FLATTEST), -math.log(FLATTEST)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            return integer(generator, height - h + 1), integer(generator, width - w + 1), h, w
    return 0, 0, 0, 0


def soft(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """labels [B] -> probabilities [B, classes]: 1 - smoothing for the label, and smoothing spread over all classes."""
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def mix(
    pixels: Tensor, targets: Tensor, mixup_alpha: float, cutmix_alpha: float, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Mix a batch with itself in reverse: by mixup or by CutMix, one as likely as the other if both are above 0."""
    if mixup_alpha == 0 and cutmix_alpha == 0:
        return pixels, targets
    cut = cutmix_alpha > 0 and (mixup_alpha == 0 or uniform(generator) < 0.5)
    if cut:
        return cutmix(pixels, targets, beta(generator, cutmix_alpha), generator)
    return mixup(pixels, targets, beta(generator, mixup_alpha))


def mixup(pixels: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """share * own + (1 - share) * other's, of pixels [B, C, H, W] and of targets [B, classes]."""
    return pixels.lerp(pixels.flip(0), 1 - share), targets.lerp(targets.flip(0), 1 - share)


def cutmix(pixels: Tensor, targets: Tensor, share: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """A box of the other image, about 1 - share of the area; the targets go by the pixels that it really has."""
    height, width = pixels.shape[-2:]
    top, bottom = interval(height, share, generator)
    left, right = interval(width, share, generator)
    mixed = pixels.clone()
    mixed[..., top:bottom, left:right] = pixels.flip(0)[..., top:bottom, left:right]
    others = (bottom - top) * (right - left) / (height * width)
    return mixed, targets.lerp(targets.flip(0), others)


def interval(length: int, share: float, generator: Generator) -> tuple[int, int]:
    """sqrt(1 - share) of a side around a random middle, cut off where it ends."""
    half, middle = int(length * math.sqrt(1 - share)) / 2, integer(generator, length)
    return max(0, int(middle - half)), min(length, int(middle + half))


Seen = Annotated[float, Rule("a share above 0 and up to 1", lambda x: 0 < x <= 1)]
Magnitude = Annotated[float, Rule(f"a number from 0 to {FULL:.0f}", lambda x: 0 <= x <= FULL)]


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images; off by default."""

    smallest_crop: Seen = 1.0
    """Smallest share of an image that a random crop shows; at 1 the image is taken as in evaluation."""
    flip: Share = 0.0
    """Probability of a horizontal flip."""
    jitter: Share = 0.0
    """Strength of random brightness, contrast and saturation, 0 to 1."""
    randaugment: Magnitude = 0.0
    """Magnitude of RandAugment, 0 (none at all) to 10."""
    shift: NotNegative = 0.0
    """Largest random shift in pixels, for small images."""
    turn: NotNegative = 0.0
    """Largest random rotation in degrees, for small images."""
    erasing: Share = 0.0
    """Probability that a box of the image is replaced by noise."""
    mixup: NotNegative = 0.0
    """Alpha of mixup; where --cutmix is given too, each has half of the batches."""
    cutmix: NotNegative = 0.0
    """Alpha of CutMix."""
    smoothing: BelowOne = 0.0
    """Label smoothing."""
    repeats: Count = 1
    """Views of each image in a batch (repeated augmentation); an epoch then shows a share 1/repeats of them all."""

    @property
    def of_images(self) -> bool:
        """Is anything done to images one by one, before they are a batch?"""
        return self.smallest_crop < 1 or self.flip > 0 or self.jitter > 0 or self.randaugment > 0

    def view(self, image: Image, size: int, share: float, generator: Generator) -> Image:
        """One image as size x size pixels."""
        if self.smallest_crop < 1:
            image = random_crop(image, size, self.smallest_crop, generator)
        else:
            image = middle(image, size, share)
        if self.flip > 0:
            image = random_flip(image, self.flip, generator)
        if self.randaugment > 0:
            image = randaugment(image, self.randaugment, generator)
        return jitter(image, self.jitter, generator) if self.jitter > 0 else image

    def batch(
        self, pixels: Tensor, labels: Tensor, classes: int, preparation: Preparation, generator: Generator
    ) -> tuple[Tensor, Tensor]:
        """pixels [B, C, S, S] in uint8 and labels [B] -> normalized pixels and targets [B, classes]."""
        moved = move(pixels / 255, self.shift, self.turn, generator)
        erased = erase(preparation.normalized(moved), self.erasing, generator)
        return mix(erased, soft(labels, classes, self.smoothing), self.mixup, self.cutmix, generator)
