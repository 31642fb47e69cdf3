"""The gates of a read: o = g * ((1 - lam) mean + lam free), lam = sigmoid(a), g = softplus(b) / rms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.operator import declared


def result_dtype(mean: Tensor, lam: Tensor | None, gate: Tensor | None) -> torch.dtype:
    logits = gate if lam is None else lam
    return mean.dtype if logits is None else logits.dtype


@declared(fusible=True)
def gated(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    """All [B, T, H, D]; lam and gate are the logits a and b. They may have fewer digits than mean and free, and the
    result has theirs.

    rms is sqrt(mean(softplus(b)^2) + eps) over the D channels of a head. Without free and lam, which come together, the
    read is the mean; without gate it is not scaled.
    """
    return mean.new_empty(mean.shape, dtype=result_dtype(mean, lam, gate))


OPERATOR = gated.operator


def definition(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """The formula in float64."""
    read = mean.double()
    if free is not None and lam is not None:
        share = lam.double().sigmoid()
        read = (1 - share) * read + share * free.double()
    if gate is not None:
        positive = torch.logaddexp(gate.double(), torch.zeros_like(gate, dtype=torch.float64))
        read = read * positive / (positive.square().mean(-1, keepdim=True) + eps).sqrt()
    return (read,)


def examples() -> dict[str, tuple[Any, ...]]:
    """As a mixer has them: logits are columns of a projection, some of them extreme; reads may be transposed."""
    torch.manual_seed(0)
    found: dict[str, tuple[Any, ...]] = {}
    for width in (1, 5, 33):
        mean = torch.randn(2, 3, 7, width).transpose(1, 2)
        free = mean + torch.rand(2, 7, 3, width)
        projected = 8 * torch.randn(2, 7, 2 * 3 * width + 1)
        projected[0, 0, : 3 * width // 2] = -200.0
        projected[1, 3, 3 * width :] = 200.0
        lam, gate = (part.unflatten(-1, (3, width)) for part in projected[..., 1:].split(3 * width, -1))
        found[f"width {width}"] = (mean, free, lam, gate, 1e-6)
    found |= {
        "no gate": (mean, free, lam, None, 1e-6),
        "no temperature": (mean, None, None, gate, 1e-6),
        "large eps": (mean, free, lam, gate, 0.5),
        "one token": (*(x[:1, 2:3] for x in (mean, free, lam, gate)), 1e-6),
        "no token": (*(x[:, :0] for x in (mean, free, lam, gate)), 1e-6),
    }
    return found


# In torch's operations.
READS_RESULTS = False


def forward(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    dtype = result_dtype(mean, lam, gate)
    lam, gate = (None if x is None else x.to(mean.dtype) for x in (lam, gate))
    read = mean if free is None or lam is None else torch.lerp(mean, free, torch.sigmoid(lam))
    if gate is not None:  # first, because results lie in memory as what comes first: by tokens, for the projection
        read = F.rms_norm(F.softplus(gate), gate.shape[-1:], None, eps) * read
    return (read.to(dtype),)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    mean, free, lam, gate, eps = arguments
    of_lam, of_gate = (None if x is None else x.dtype for x in (lam, gate))
    to_read = grads[0].to(mean.dtype)
    lam, gate = (None if x is None else x.to(mean.dtype) for x in (lam, gate))
    share = None if lam is None else torch.sigmoid(lam)
    to_free = to_lam = to_gate = None
    read = mean if free is None or share is None else torch.lerp(mean, free, share)
    if gate is not None:
        positive = F.softplus(gate)
        inverse = torch.rsqrt(positive.square().mean(-1, keepdim=True) + eps)
        g = positive * inverse
        to_g = to_read * read
        # d g / d positive = inverse (1 - g gᵀ / D): the norm takes out what points along g.
        along = (to_g * g).mean(-1, keepdim=True)
        to_positive = torch.addcmul(to_g, g, along, value=-1) * inverse
        to_gate = torch.ops.aten.softplus_backward(to_positive, gate, 1, 20)
        to_read = to_read * g
    if free is not None and share is not None:
        to_free = to_read * share
        to_read = to_read - to_free
        to_lam = to_free * (free - read)  # (1 - lam) (free - mean) = free - read
    to_lam, to_gate = (None if x is None else x.to(dtype) for x, dtype in ((to_lam, of_lam), (to_gate, of_gate)))
    return to_read, to_free, to_lam, to_gate
