"""Checkpoints: a folder per saved step, complete or absent, of which the newest two are kept.

checkpoints/step-00000400/weights.safetensors   the model
                          optimizer.pt          the optimizer's state
                          checkpoint.json       step, seconds trained, and a checksum of each file
"""

import json
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from femixer.optional import require
from femixer.training import atomic

KEEP = 2
WEIGHTS, OPTIMIZER, ABOUT = "weights.safetensors", "optimizer.pt", "checkpoint.json"


@dataclass(frozen=True)
class Position:
    """How far training has come: steps done, and the seconds they took."""

    step: int = 0
    seconds: float = 0.0


class Corrupt(Exception):
    """A checkpoint is not what was written."""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, position: Position) -> None:
    """Save a checkpoint and delete all but the newest `KEEP`. It must not exist: a step is saved once."""
    safetensors = require("safetensors.torch", "cli")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(folder / f"step-{position.step:08d}") as partial:
        partial.mkdir()
        safetensors.save_model(model, str(partial / WEIGHTS))
        torch.save(optimizer.state_dict(), partial / OPTIMIZER)
        about = {
            "step": position.step,
            "seconds": position.seconds,
            "crc32": {name: checksum(partial / name) for name in (WEIGHTS, OPTIMIZER)},
        }
        (partial / ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")
    for old in stored(folder)[KEEP:]:
        atomic.remove(old)


def restore(folder: Path, model: nn.Module, optimizer: Optimizer) -> Position:
    """Load the newest intact checkpoint into `model` and `optimizer`; without one, change nothing.

    A damaged checkpoint gives a warning, is deleted and the one before it is used.
    """
    safetensors = require("safetensors.torch", "cli")
    for path in stored(folder):
        try:
            position = verify(path)
        except Corrupt as problem:
            warnings.warn(f"checkpoint {path} is damaged ({problem}); going back to the one before", stacklevel=2)
            atomic.remove(path)
            continue
        safetensors.load_model(model, str(path / WEIGHTS))
        optimizer.load_state_dict(torch.load(path / OPTIMIZER, weights_only=True))
        return position
    return Position()


def verify(path: Path) -> Position:
    """Where the checkpoint stands, or `Corrupt` if a file is missing or differs from what was written."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        for name, expected in about["crc32"].items():
            if checksum(path / name) != expected:
                raise Corrupt(f"{name} has changed")
        return Position(about["step"], about["seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{type(error).__name__}: {error}") from error


def stored(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix != atomic.PARTIAL), reverse=True)


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
