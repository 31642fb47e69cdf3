"""Random parts of a picture at the size that a model takes, for training."""

from __future__ import annotations

import math

from torch import Generator

from femixer.models.vision.pictures import Picture, resized
from femixer.optional import require
from femixer.tasks.vision.drawing import integer, uniform

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
