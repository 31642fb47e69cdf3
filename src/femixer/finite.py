"""Results that are not finite are none: they end a command, and are neither written nor shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def check_numbers(values: Mapping[str, Any], what: str) -> None:
    """Raise a FloatingPointError that names a number (also one in a list or mapping) which is NaN or infinite."""
    for name, value in values.items():
        inner = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else None
        if inner is not None:
            check_numbers({f"{name}.{each}": one for each, one in inner.items()}, what)
        elif isinstance(value, float) and not math.isfinite(value):
            raise FloatingPointError(f"{what}: {name} is {value}, which is no result")


def check_tensor(values: Tensor, what: str) -> Tensor:
    """The tensor itself, or a FloatingPointError if one of its numbers is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        count = f"{bad:,} of {values.numel():,} numbers"
        raise FloatingPointError(f"{what}: {count} are NaN or infinite, which is no result")
    return values


def watch_logits(model: nn.Module, name: str) -> nn.Module:
    """Check the logits of every pass of `model`: the largest of NaN is the first token, and looks like an answer."""

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            check_tensor(logits, f"the logits of {name}")

    model.register_forward_hook(hook)
    return model
