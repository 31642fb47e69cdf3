"""Rotary positions as one compiled kernel each way, for queries and keys in the columns of a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.arrays import array, strided
from femixer.kernels.rotary import numba_loops as loops

READS_ARGUMENTS = ("cos", "sin")
# Floors of features are not negative.
NO_FLOOR = -1.0


def refuse(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> str | None:
    if not q.dtype == k.dtype == cos.dtype == torch.float32:
        return f"it takes float32, not q of {q.dtype}, k of {k.dtype} and cos of {cos.dtype}"
    return None


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    angles, least = (array(cos), array(sin)), NO_FLOOR if floor is None else floor
    found = []
    for x in (q, k):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        loops.forward(*strided(x), array(out), *angles, least)
        found.append(out)
    return tuple(found)


def backward(
    grads: tuple[Tensor | None, ...],
    arguments: tuple[None, None, Tensor, Tensor, float | None],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    _, _, cos, sin, floor = arguments
    angles, least = (array(cos), array(sin)), NO_FLOOR if floor is None else floor
    found: list[Tensor | None] = []
    for grad, y in zip(grads, results, strict=True):
        out = None
        if grad is not None:
            out = grad.new_empty(grad.shape)
            loops.backward(*strided(grad, y), array(out), *angles, least)
        found.append(out)
    return *found, None, None
