"""The results of image classification: what a store of them is called, and reading them."""

from __future__ import annotations

import os

from femixer.training import jobs
from femixer.training.results import Record

KIND = jobs.Kind("vision", "vision 1")


def load(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a store (a folder), or of a file that `femixer vision export` wrote."""
    return jobs.load(path, KIND)
