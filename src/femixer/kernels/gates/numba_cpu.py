"""The gates of a read as one compiled kernel each way, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.arrays import array, strided
from femixer.kernels.gates import numba_loops as loops

READS_RESULTS = False


def refuse(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> str | None:
    for x in (mean, free, lam, gate):
        if x is not None and (x.dtype != torch.float32 or x.shape != mean.shape):
            return f"it takes float32 tensors of one shape, not {x.dtype} {tuple(x.shape)}"
    if mean.dim() != 4:
        return f"it takes tensors [B, T, H, D], not {tuple(mean.shape)}"
    return None


def forward(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    out = torch.empty_like(mean, memory_format=torch.contiguous_format)
    loops.forward(*strided(mean, free, lam, gate), eps, array(out))
    return (out,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    *tensors, eps = arguments
    mean = tensors[0]
    # The loops take empty arrays for what is not there.
    results = [mean.new_empty(mean.shape if x is not None else (0,) * 4) for x in tensors]  # type: ignore[union-attr]
    loops.backward(*strided(*tensors, grads[0]), eps, *map(array, results))
    return tuple(None if x is None else to_x for x, to_x in zip(tensors, results, strict=True))
