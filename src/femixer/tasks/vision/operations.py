"""The fifteen operations of RandAugment, in the "increasing" form in which DeiT uses them.

Names and ranges as published with timm (rand-m9-mstd0.5-inc1): a strength of 0 to 1 turns by up to 30 degrees, shears
by up to 0.3, shifts by up to 0.45 of a side, changes colour, contrast, brightness and sharpness by a factor of
1 +- 0.9, keeps 4 to 0 bits, inverts what is brighter than 256 to 0, and adds up to 110 to what is darker than 128.
AutoContrast, Equalize and Invert have no strength; signs are random. Every operation is (picture, strength, generator)
-> picture.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Generator

from femixer.models.vision.pictures import Picture
from femixer.optional import require
from femixer.tasks.vision.drawing import integer, sign

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
