"""Reading one picture with Pillow, whatever its file holds."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

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


def decoded(content: Path | bytes, channels: int) -> Picture:
    """The picture in a file, upright (as EXIF says), of 1 or 3 channels; transparent parts are white."""
    image = require("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, large sizes: what matters is whether there are pixels
            with image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as file:
                return converted(require("PIL.ImageOps", "vision").exif_transpose(file), channels)
    except Exception as error:  # each format's reader has its own
        raise Unreadable(reason(content, error)) from error


def reason(content: Path | bytes, error: Exception) -> str:
    """Why a picture cannot be read, in a line."""
    try:
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
    except OSError as problem:
        return problem.strerror or str(problem)
    if size == 0:
        return "the file is empty"
    if type(error).__name__ == "UnidentifiedImageError":
        return "not a format that Pillow knows"
    return " ".join(str(error).split()) or type(error).__name__


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
