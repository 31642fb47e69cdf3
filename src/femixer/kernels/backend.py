"""The one place that decides whether a recurrence runs as a compiled kernel or in plain torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_usable = importlib.util.find_spec("numba") is not None


def _after_fork() -> None:
    """OpenMP, whose threads the kernels share with torch, does not survive a fork."""
    global _usable
    _usable = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def compiled(like: Tensor) -> bool:
    """Whether there are compiled kernels for tensors like this one; plain torch must do where not."""
    return _usable and like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)


def native(name: str) -> ModuleType:
    """The module `name` of compiled kernels; importing numba takes a moment, so not before they are needed."""
    return importlib.import_module(f"femixer.kernels.native.{name}")


def array(x: Tensor) -> Any:
    """The numpy view of a tensor's memory that a compiled kernel reads or writes."""
    return x.detach().numpy()
