"""The gates of a read: o = g * ((1 - lam) mean + lam free), lam = sigmoid(a), g = softplus(b) / rms."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import declared


@declared(fusible=True)
def gated(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    """All [B, T, H, D] and of one type; lam and gate are the logits a and b.

    rms is sqrt(mean(softplus(b)^2) + eps) over the D channels of a head. Without free and lam, which come together, the
    read is the mean; without gate it is not scaled.
    """
    return torch.empty_like(mean, memory_format=torch.contiguous_format)


OPERATOR = gated.operator
