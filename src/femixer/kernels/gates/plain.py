"""The gates of a read in torch's operations."""

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.gates import result_dtype

READS_RESULTS = False


def forward(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    dtype = result_dtype(mean, lam, gate)
    lam, gate = (None if x is None else x.to(mean.dtype) for x in (lam, gate))
    read = mean if free is None or lam is None else torch.lerp(mean, free, torch.sigmoid(lam))
    if gate is not None:
        read = read * F.rms_norm(F.softplus(gate), gate.shape[-1:], None, eps)
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
        to_lam = (free - read) * to_free  # (1 - lam) (free - mean) = free - read
    to_lam, to_gate = (None if x is None else x.to(dtype) for x, dtype in ((to_lam, of_lam), (to_gate, of_gate)))
    return to_read, to_free, to_lam, to_gate
