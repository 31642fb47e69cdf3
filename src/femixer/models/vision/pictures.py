"""Pictures of Pillow's as models see them: the mode, the middle at some size, and pixels as a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from femixer.optional import require

Picture = Any
"""A PIL.Image.Image in mode L or RGB."""
MODES = {1: "L", 3: "RGB"}
"""channels -> mode of a decoded picture, with 8 bits per channel."""
DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
"""Modes of pictures with more than 8 bits."""
RANGES = (1.0, 255.0, 65535.0)
"""Largest values of pictures: shares of white, 8 and 16 bits."""


class Unreadable(Exception):
    """There is no picture to be read; the message says why."""


def upright(picture: Picture, channels: int) -> Picture:
    """Turned as EXIF says, with 1 or 3 channels of 8 bits; transparent parts are white."""
    return converted(require("PIL.ImageOps", "vision").exif_transpose(picture), channels)


def converted(picture: Picture, channels: int) -> Picture:
    """Another mode, of 8 bits."""
    image = require("PIL.Image", "vision")
    if picture.mode in DEEP:
        picture = image.fromarray(shallow(np.asarray(picture), picture.mode))
    if picture.has_transparency_data:
        whole = picture.convert("RGBA")
        picture = image.alpha_composite(image.new("RGBA", whole.size, "white"), whole)
    return picture if picture.mode == MODES[channels] else picture.convert(MODES[channels])


def shallow(pixels: np.ndarray, mode: str) -> np.ndarray:
    """Deep pixels in uint8; of 16 bits the upper 8. Modes I and F do not tell the range: the least that holds them."""
    values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
    largest = RANGES[-1] if mode.startswith("I;16") else next((r for r in RANGES if values.max(initial=0) <= r), None)
    if mode == "I" and largest == 1:
        largest = RANGES[1]  # whole numbers: black and nearly black
    if largest is None or values.min(initial=0) < 0:
        raise Unreadable(f"pixels from {values.min():g} to {values.max():g}, of a range that is not known")
    return (values / 256 if largest == RANGES[-1] else values * (255 / largest)).clip(0, 255).astype(np.uint8)


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


def as_tensor(picture: Picture) -> Tensor:
    """[C, H, W] in uint8."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
