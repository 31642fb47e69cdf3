"""RMS norm: y = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import declared


@declared(fusible=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] -> [..., width]."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


OPERATOR = rms_norm.operator
