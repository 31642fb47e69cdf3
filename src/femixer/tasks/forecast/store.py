"""The results of forecasting: what a store of them is called, and reading them."""

from __future__ import annotations

import os

from femixer.training import jobs
from femixer.training.results import Record

KIND = jobs.Kind("forecast", "forecast 1")


def load(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a store (a folder), or of a file that `femixer forecast export` wrote."""
    return jobs.load(path, KIND)
