"""What a time depends on besides the options."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from femixer import __version__


def environment(threads: int, device: str) -> dict[str, Any]:
    return {
        "femixer": __version__,
        "torch": torch.__version__,
        "numba": _version("numba"),
        "python": platform.python_version(),
        "threads": threads,
        "instructions": torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name(),
    }


def _version(package: str) -> str | None:
    """Without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
