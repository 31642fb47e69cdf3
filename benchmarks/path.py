"""The way of a step through femixer's files: `python benchmarks/path.py [-v] [priors]`.

Prints, for each prior, how many files of femixer a step passes through and how often it goes from one to another,
counted by the calls of Python functions: for a whole step of training, and for its forward pass alone. -v lists the
way. Files are loaded and kernels compiled in a step before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import femixer
from femixer import FreeEnergyMixer

PACKAGE = f"{Path(femixer.__file__).parent}/"
PRIORS = ("gla", "softmax", "mamba")


def way(call: Callable[[], object]) -> list[str]:
    """The files that a call goes through, one after the other."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            calls.append(name.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name, _ in groupby(calls)]


def ways(prior: str, dim: int = 64, heads: int = 2, length: int = 128) -> dict[str, list[str]]:
    mixer = FreeEnergyMixer(dim, heads, prior=prior)
    x = torch.randn(2, length, dim, requires_grad=True)

    def train() -> None:
        mixer(x).sum().backward()

    def forward() -> None:
        with torch.no_grad():
            mixer(x)

    train()
    forward()
    return {"training": way(train), "forward": way(forward)}


if __name__ == "__main__":
    verbose = "-v" in sys.argv[1:]
    for prior in [name for name in sys.argv[1:] if name != "-v"] or PRIORS:
        for what, files in ways(prior).items():
            print(f"{prior}, {what}: {len(set(files))} files, {len(files) - 1} switches between them")
            if verbose:
                print("  " + "\n  ".join(files))
