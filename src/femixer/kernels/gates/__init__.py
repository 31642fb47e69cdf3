"""The gates of a read: o = g * ((1 - lam) mean + lam free), lam = sigmoid(a), g = softplus(b) / rms."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import Operator
from femixer.kernels.precision import handed_dtype


def _results(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    return (mean.new_empty(mean.shape, dtype=result_dtype(mean, lam, gate)),)


def result_dtype(mean: Tensor, lam: Tensor | None, gate: Tensor | None) -> torch.dtype:
    logits = gate if lam is None else lam
    return mean.dtype if logits is None else logits.dtype


OPERATOR = Operator(__name__, _results, fusible=True)


def gated(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    """All [B, T, H, D]; lam and gate are the logits a and b. They may have fewer digits than mean and free, and the
    result has theirs.

    rms is sqrt(mean(softplus(b)^2) + eps) over the D channels of a head. Without free and lam, which come together, the
    read is the mean; without gate it is not scaled.
    """
    dtype = result_dtype(mean, lam, gate)
    lam, gate = (None if x is None else x.to(handed_dtype(x)) for x in (lam, gate))
    return OPERATOR(mean, free, lam, gate, eps)[0].to(dtype)
