"""Reading one picture with Pillow, whatever its file holds."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

from femixer.models.vision.pictures import Picture, Unreadable, upright
from femixer.optional import require


def decoded(content: Path | bytes, channels: int) -> Picture:
    """The picture in a file, upright (as EXIF says), of 1 or 3 channels; transparent parts are white."""
    image = require("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, large sizes: what matters is whether there are pixels
            with image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as file:
                return upright(file, channels)
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
