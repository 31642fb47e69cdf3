"""Parts of a picture at the size that a model takes: the middle for evaluation, a random one for training."""

from __future__ import annotations

import math

from torch import Generator

from femixer.optional import require
from femixer.tasks.images.decode import Picture
from femixer.tasks.images.drawing import integer, uniform

ASPECTS = (3 / 4, 4 / 3)
"""Width / height of random crops (Szegedy et al., 2015)."""
TRIES = 10


def resized(picture: Picture, width: int, height: int, box: tuple[float, ...] | None = None) -> Picture:
    """A part of the picture, left, top, right, bottom, at another size, bicubic."""
    if box is None and picture.size == (width, height):
        return picture
    return picture.resize((width, height), require("PIL.Image", "vision").Resampling.BICUBIC, box=box)


def middle(picture: Picture, size: int, share: float) -> Picture:
    """The middle size x size pixels, of a picture whose shorter side is first made size / share long."""
    shorter = round(size / share)
    scale = shorter / min(picture.size)
    width, height = (max(shorter, round(side * scale)) for side in picture.size)
    if (width, height) == (size, size):
        return resized(picture, size, size)
    # The same pixels as of the whole picture at that size, which a very long one would fill the memory with.
    left, top = (width - size) // 2, (height - size) // 2
    across, down = picture.width, picture.height
    box = left * across / width, top * down / height, (left + size) * across / width, (top + size) * down / height
    return resized(picture, size, size, box)


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
