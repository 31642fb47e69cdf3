"""`femixer forecast export`: a store of results as one small file."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.tasks.forecast.store import KIND
from femixer.training.jobs.exporting import run


def main(args: Sequence[str]) -> int:
    return run(args, KIND)
