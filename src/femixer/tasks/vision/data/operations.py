"""What can be done to one picture: crops, flips, the operations of RandAugment, and jitter."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Generator

from femixer.models.vision.pictures import Picture, resized
from femixer.optional import require


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


def random_crop(picture: Picture, size: int, smallest: float, generator: Generator) -> Picture:
    """A box of `smallest` to all of the picture's area, of random aspect and place, as size x size pixels."""
    width, height = picture.size
    return resized(picture, size, size, random_box(width, height, smallest, generator))


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


def random_flip(picture: Picture, probability: float, generator: Generator) -> Picture:
    """Left and right exchanged."""
    if uniform(generator) >= probability:
        return picture
    return require("PIL.ImageOps", "vision").mirror(picture)


Operation = Callable[[Picture, float, Generator], Picture]

FILL = (124, 116, 104)
"""What comes into view where a picture is moved: the mean colour of ImageNet."""
TURN, SHEAR, SHIFT, CHANGE, BITS, ADDED = 30.0, 0.3, 0.45, 0.9, 4, 110
DARKEST = 0.1
"""Smallest factor of a change."""


def fill(picture: Picture) -> tuple[int, ...]:
    return FILL if picture.mode == "RGB" else (round(sum(FILL) / 3),)


def interpolation(generator: Generator) -> int:
    """Bilinear or bicubic, one as likely as the other."""
    resampling = require("PIL.Image", "vision").Resampling
    return (resampling.BILINEAR, resampling.BICUBIC)[integer(generator, 2)]


def moved(picture: Picture, matrix: tuple[float, ...], generator: Generator) -> Picture:
    """The pixel (x, y) shows what was at (a x + b y + c, d x + e y + f)."""
    affine = require("PIL.Image", "vision").Transform.AFFINE
    return picture.transform(picture.size, affine, matrix, resample=interpolation(generator), fillcolor=fill(picture))


def auto_contrast(picture: Picture, strength: float, generator: Generator) -> Picture:
    return require("PIL.ImageOps", "vision").autocontrast(picture)


def equalize(picture: Picture, strength: float, generator: Generator) -> Picture:
    return require("PIL.ImageOps", "vision").equalize(picture)


def invert(picture: Picture, strength: float, generator: Generator) -> Picture:
    return require("PIL.ImageOps", "vision").invert(picture)


def rotate(picture: Picture, strength: float, generator: Generator) -> Picture:
    angle = sign(generator) * strength * TURN
    return picture.rotate(angle, resample=interpolation(generator), fillcolor=fill(picture))


def posterize(picture: Picture, strength: float, generator: Generator) -> Picture:
    """At full strength no bit is left, as published, and which Pillow's own function refuses."""
    dropped = 8 - BITS + int(strength * BITS)
    return each_level(picture, lambda level: level >> dropped << dropped)


def solarize(picture: Picture, strength: float, generator: Generator) -> Picture:
    return require("PIL.ImageOps", "vision").solarize(picture, 256 - int(strength * 256))


def solarize_add(picture: Picture, strength: float, generator: Generator) -> Picture:
    added = int(strength * ADDED)
    return each_level(picture, lambda level: min(255, level + added) if level < 128 else level)


def each_level(picture: Picture, change: Callable[[int], int]) -> Picture:
    return picture.point([change(level) for level in range(256)] * len(picture.getbands()))


def enhanced(name: str) -> Operation:
    """One of Pillow's enhancers, with a factor on either side of 1."""

    def operation(picture: Picture, strength: float, generator: Generator) -> Picture:
        factor = max(DARKEST, 1 + sign(generator) * strength * CHANGE)
        return getattr(require("PIL.ImageEnhance", "vision"), name)(picture).enhance(factor)

    return operation


def shear_x(picture: Picture, strength: float, generator: Generator) -> Picture:
    return moved(picture, (1, sign(generator) * strength * SHEAR, 0, 0, 1, 0), generator)


def shear_y(picture: Picture, strength: float, generator: Generator) -> Picture:
    return moved(picture, (1, 0, 0, sign(generator) * strength * SHEAR, 1, 0), generator)


def shift_x(picture: Picture, strength: float, generator: Generator) -> Picture:
    return moved(picture, (1, 0, sign(generator) * strength * SHIFT * picture.width, 0, 1, 0), generator)


def shift_y(picture: Picture, strength: float, generator: Generator) -> Picture:
    return moved(picture, (1, 0, 0, 0, 1, sign(generator) * strength * SHIFT * picture.height), generator)


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": auto_contrast,
    "Equalize": equalize,
    "Invert": invert,
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "Color": enhanced("Color"),
    "Contrast": enhanced("Contrast"),
    "Brightness": enhanced("Brightness"),
    "Sharpness": enhanced("Sharpness"),
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": shift_x,
    "TranslateY": shift_y,
}


LAYERS = 2
"""Operations of a picture."""
PROBABILITY = 0.5
"""Of each of them."""
DEVIATION = 0.5
"""Of the magnitude, which is normal; its range is 0 to FULL."""
FULL = 10.0
JITTERED = ("Brightness", "Contrast", "Color")


def randaugment(picture: Picture, magnitude: float, generator: Generator) -> Picture:
    """Two operations, each of any of the fifteen and each left out half of the time."""
    names = [*OPERATIONS]
    for _ in range(LAYERS):
        operation = OPERATIONS[names[integer(generator, len(names))]]
        strength = min(max(normal(generator, magnitude, DEVIATION), 0.0), FULL) / FULL
        if uniform(generator) < PROBABILITY:
            picture = operation(picture, strength, generator)
    return picture


def jitter(picture: Picture, strength: float, generator: Generator) -> Picture:
    """Brightness, contrast and saturation times factors of 1 - strength to 1 + strength, in random order."""
    enhance, names = require("PIL.ImageEnhance", "vision"), [*JITTERED]
    while names:
        name = names.pop(integer(generator, len(names)))
        factor = uniform(generator, max(0.0, 1 - strength), 1 + strength)
        picture = getattr(enhance, name)(picture).enhance(factor)
    return picture
