"""Random erasing (Zhong et al., 2020): a box of noise in some of the pictures of a batch."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from femixer.tasks.vision.drawing import integer, uniform

AREAS = (0.02, 1 / 3)
"""Of the picture."""
FLATTEST = 0.3
"""Height / width of a box is between this and its inverse."""
TRIES = 10


def erase(pixels: Tensor, probability: float, generator: Generator) -> Tensor:
    """pixels [B, C, H, W], normalized: each picture with this probability gets a box of standard normal noise."""
    if probability == 0:
        return pixels
    pixels = pixels.clone()
    channels, height, width = pixels.shape[1:]
    for picture in pixels:
        if uniform(generator) < probability:
            top, left, h, w = random_box(height, width, generator)
            picture[:, top : top + h, left : left + w] = torch.randn(channels, h, w, generator=generator)
    return pixels


def random_box(height: int, width: int, generator: Generator) -> tuple[int, int, int, int]:
    """Top, left, height, width of a box that fits; nothing if none that was drawn does."""
    for _ in range(TRIES):
        area = height * width * uniform(generator, *AREAS)
        aspect = math.exp(uniform(generator, math.log(FLATTEST), -math.log(FLATTEST)))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < h < height and 0 < w < width:
            return integer(generator, height - h + 1), integer(generator, width - w + 1), h, w
    return 0, 0, 0, 0
