"""In which types operators get their tensors, and one place that switches autocast off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Of exponentials, logarithms and sums of x: float32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this type, unless it has more digits."""
    return x.to(torch.promote_types(x.dtype, dtype))


def handed_dtype(x: Tensor) -> torch.dtype:
    """Of what is handed to an operator per token: as it comes, because the operator computes in `wide_dtype`; on a CPU,
    where half precision is not faster, in that."""
    return wide_dtype(x) if x.device.type == "cpu" else x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Exp, log, scans and normalizers run in the type they are given."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
