"""The functions of `femixer.kernels.streams` as compiled kernels, for float32 on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from femixer.kernels import streams as torch_streams
from femixer.kernels.arrays import array, strided
from femixer.kernels.streams import FAR_BELOW, NARROW, SMALL_BETA, Range, Shift, least_sum
from femixer.kernels.streams import numba_loops as loops

# What the kernels compare with: the least total, the nats of a narrow channel, the least beta of others, and how far
# below top F may lie.
LIMITS = np.array([least_sum(torch.float32), NARROW, SMALL_BETA, FAR_BELOW], dtype=np.float32)
_NO_HEADS = np.empty((0, 0), dtype=np.bool_)


def value_range(v: Tensor, beta: Tensor, segments: Tensor | None) -> tuple[Range, Shift]:
    if segments is not None:
        return torch_streams.value_range(v, beta, segments)
    bottom, top, base = v.new_empty(3, v.shape[0], *v.shape[2:])
    loops.span(*strided(v), v.shape[1], array(beta.contiguous()), NARROW, *map(array, (bottom, top, base)))
    return Range(bottom[:, None], top[:, None]), Shift(top[:, None], base[:, None])


def value_streams(v: Tensor, beta: Tensor | None, shift: Shift | None) -> Tensor:
    if beta is None or shift is None:
        return v
    streams = v.new_empty(*v.shape[:-1], 2 * v.shape[-1])
    loops.streams(*strided(v), *_arrays(beta, shift), array(streams))
    return streams


def read_sums(sums: Tensor, beta: Tensor, shift: Shift, span: Range) -> tuple[Tensor, Tensor, Tensor | None]:
    """mu and F are parts of the sums, which are used up."""
    b, t, h, d = *sums.shape[:3], sums.shape[3] // 2
    sums = sums if sums.stride(3) == 1 else sums.contiguous()
    mean, total = sums.split(d, -1)
    doubtful = torch.zeros(b, h, dtype=torch.bool)
    loops.settle(*strided(sums, total), (b, t, h, d), *_arrays(beta, shift, span), LIMITS, array(doubtful))
    return mean, total, doubtful


def undo_read(
    to_mean: Tensor, to_free: Tensor, mean: Tensor, free: Tensor, beta: Tensor, shift: Shift, apart: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, h, d = free.shape
    inner, sums = free.new_empty(2, b, t, h, 2 * d)
    dbeta = free.new_empty(b * loops.stretches(t), h, d)
    hidden = _NO_HEADS if apart is None else array(apart.contiguous())
    inputs = (*strided(to_mean, to_free, mean, free), *_arrays(beta, shift), hidden)
    loops.undo(*inputs, *map(array, (inner, sums, dbeta)))
    return inner, sums, dbeta.sum(0).unflatten(0, (-1, h // beta.shape[0])).sum(1)


def undo_streams(to_streams: Tensor, streams: Tensor, v: Tensor, beta: Tensor, shift: Shift) -> tuple[Tensor, Tensor]:
    dv, dbeta = v.new_empty(v.shape), v.new_empty(v.shape[0] * loops.stretches(v.shape[1]), *v.shape[2:])
    loops.through(*strided(to_streams, streams, v), *_arrays(beta, shift), *map(array, (dv, dbeta)))
    return dv, dbeta.sum(0)


def _arrays(beta: Tensor, shift: Shift, span: Range | None = None) -> list[Any]:
    """beta [G, D], (bottom,) top and base [B, G, D] as the compiled kernels read them."""
    per_sequence = (shift.top, shift.base) if span is None else (span.bottom, shift.top, shift.base)
    return [array(beta.contiguous()), *(array(x[:, 0].contiguous()) for x in per_sequence)]
