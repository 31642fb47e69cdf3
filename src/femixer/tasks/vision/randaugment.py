"""RandAugment (Cubuk et al., 2020), as DeiT has it from timm: rand-m9-mstd0.5-inc1. And colour jitter."""

from __future__ import annotations

from torch import Generator

from femixer.models.vision.pictures import Picture
from femixer.optional import require
from femixer.tasks.vision.drawing import integer, normal, uniform
from femixer.tasks.vision.operations import OPERATIONS

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
