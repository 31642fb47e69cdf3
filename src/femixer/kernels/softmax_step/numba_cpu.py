"""One token's softmax read: one compiled kernel where the token sees all of the cache, else as plain torch does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.arrays import NOTHING, array
from femixer.kernels.softmax import softmax_read
from femixer.kernels.softmax_step import HEADROOM, plain
from femixer.kernels.softmax_step import numba_loops as loops
from femixer.kernels.streams import FAR_BELOW, SMALL_BETA, least_sum

# Of sums, temperatures, differences to the shift and cached exponentials.
LIMITS = least_sum(torch.float32), SMALL_BETA, FAR_BELOW, HEADROOM


def refuse(
    q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, data: Tensor, shift: Tensor, *_: Any
) -> str | None:
    for x in (q, k, v, keys, data, shift):
        if x is not None and x.dtype != torch.float32:
            return f"it takes float32, not {x.dtype}"
    return None if q.numel() else "the batch is empty"


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    data: Tensor,
    shift: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    length: int,
    window: int | None,
) -> tuple[Tensor, ...]:
    sees_all = bias is None and segments_q is None and (window is None or window >= length)
    if k is None or v is None or not (sees_all and keys.is_contiguous() and data.is_contiguous()):
        return plain.forward(q, k, v, keys, data, shift, beta, bias, segments_q, segments_k, length, window)
    batch, _, heads, width = q.shape
    groups, d = v.shape[2:]
    mean = q.new_empty(batch, 1, heads, d)
    free = mean if beta is None else q.new_empty(batch, 1, heads, d)
    top, doubt = q.new_empty(shift.shape), q.new_empty(batch, groups, dtype=torch.int8)
    grouped = batch, groups, heads // groups, d
    doubts = array(doubt)
    loops.step(
        array(q.contiguous().view(*grouped[:3], width)),
        array(k.contiguous().view(batch, groups, width)),
        array(v.contiguous().view(batch, groups, d)),
        array(keys.view(batch * groups, -1)),
        array(data.view(batch * groups, -1)),
        data.shape[3],
        array(shift.contiguous().view(batch, groups, d)),
        NOTHING.reshape(1, 0).repeat(groups, 0) if beta is None else array(beta.contiguous()),
        length,
        LIMITS,
        array(top.view(batch, groups, d)),
        array(mean.view(grouped)),
        array(free.view(grouped)),
        doubts,
    )
    if beta is not None and doubts.any():
        k, v = keys[:, :, :length].transpose(1, 2), data[:, :, :length, :d].transpose(1, 2)
        mean, exact = softmax_read(q, k, v, beta)
        assert exact is not None
        free = exact
    return mean, q.new_empty(0) if beta is None else free, top, doubt
