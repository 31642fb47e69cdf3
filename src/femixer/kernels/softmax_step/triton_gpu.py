"""The softmax step by two kernels: splits of the cache side by side, and their sums together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.softmax import triton_call
from femixer.kernels.softmax.triton_call import padded, side_by_side
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.softmax_step import triton_kernels
from femixer.kernels.triton_launch import launch, target_of

# Programs that keep a GPU busy, the keys that one takes at least, and the heads that share a key/value head at most.
PROGRAMS, LEAST_KEYS, MOST_HEADS = 512, 128, 64
# Keys that a program reads at a time, and splits that are combined at a time.
KEYS = 32
SPLITS = 16


def refuse(
    q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, data: Tensor, shift: Tensor, *rest: Any
) -> str | None:
    beta, bias, segments_q, segments_k, length, window = rest
    if data.shape[3] != shift.shape[3]:
        return "caches with exponentials are kept on a CPU only"
    if keys.stride(3) != 1 or keys.stride(2) != keys.shape[3] or data.stride(3) != 1 or data.stride(2) != data.shape[3]:
        return "a cache must be contiguous along its tokens and channels"
    if any(x is not None and x.dtype != keys.dtype for x in (k, v)):
        return f"token and cache must be of one type, not {k.dtype if k is not None else None} and {keys.dtype}"
    if q.shape[2] > MOST_HEADS * keys.shape[1]:
        return f"more than {MOST_HEADS} heads share a key/value head"
    seen = Visibility(bias, segments_q, segments_k, True, window)
    of_keys, of_values = (x[:, :, :length].transpose(1, 2) for x in (keys, data))
    return triton_call.refuse(q, of_keys, of_values, beta, seen, k, v)


def forward(
    q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, data: Tensor, shift: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    beta, bias, segments_q, segments_k, length, window = rest
    batch, _, heads, key_width = q.shape
    groups, width = keys.shape[1], data.shape[3]
    q, shift = side_by_side(q), shift.detach().contiguous()
    k, v, segments_q, segments_k = (None if x is None else side_by_side(x) for x in (k, v, segments_q, segments_k))
    mean, free = q.new_empty(batch, 1, heads, width), q.new_empty(0 if beta is None else (batch, 1, heads, width))
    next_shift = torch.empty_like(shift) if v is not None else shift
    block = KEYS
    near = length if window is None or segments_k is not None else min(window, length)
    start = (length - near) // block
    splits = min(-(-PROGRAMS // (batch * groups)), -(-near // LEAST_KEYS))
    blocks = -(-(-(-length // block) - start) // splits)
    splits = -(-(-(-length // block) - start) // blocks)
    tops, log_max, weight, means, totals = _sums(q, splits, groups, width, beta is not None)
    rank = q
    if window is not None and segments_k is not None:
        rank = (segments_k >= 0).cumsum(1, dtype=torch.int32)
    inputs = (q if x is None else x for x in (k, v, keys, data, shift, beta, bias, segments_q, segments_k))
    count = batch * heads * near
    repeats = heads // groups
    launch(
        triton_kernels.read_splits,
        (batch * groups * splits,),
        *(q, *inputs, rank, next_shift, tops, log_max, weight, means, totals),
        *(length, groups, repeats, splits, start, blocks, window or 0, key_width, width, key_width**-0.5),
        *(q.stride(0), q.stride(2), *_strides(k, (0, 2)), *_strides(v, (0, 2))),
        *(*keys.stride()[:2], *data.stride()[:2], *_strides(bias, (0, 1, 3))),
        *(*_strides(segments_q, (0,)), *_strides(segments_k, (0,))),
        moved=batch * groups * near * (key_width + width) * keys.element_size(),
        flops=2 * count * (key_width + width * (1 if beta is None else 2)),
        exponentials=count + (0 if beta is None else batch * groups * near * width),
        BETA=beta is not None,
        WRITE=v is not None,
        HAS_BIAS=bias is not None,
        SEGMENTS=segments_k is not None,
        WINDOW=window is not None,
        KEY_WIDTH=padded(key_width),
        WIDTH=padded(width),
        HEADS=padded(repeats),
        KEYS=block,
        PRECISION="ieee" if target_of(q).startswith("gfx") else "tf32x3",
        num_warps=4,
        num_stages=1 if key_width <= 32 else 2,  # what spills no registers
    )
    launch(
        triton_kernels.combine,
        (batch * heads,),
        *(tops, log_max, weight, means, totals, q if beta is None else beta, mean, q if beta is None else free),
        *(splits, heads, repeats, width),
        BETA=beta is not None,
        WIDTH=padded(width),
        SPLITS=SPLITS,
        num_warps=1,
    )
    return mean, free, next_shift, torch.zeros(batch, groups, dtype=torch.int8, device=q.device)


def _sums(q: Tensor, splits: int, groups: int, width: int, free: bool) -> tuple[Tensor, ...]:
    batch, heads = q.shape[0], q.shape[2]
    tops = q.new_empty(batch, splits, groups, width, dtype=torch.float32)
    log_max, weight = q.new_empty(2, batch, splits, heads, dtype=torch.float32)
    means, totals = q.new_empty(2, batch, splits, heads, width, dtype=torch.float32)
    return tops, log_max, weight, means, totals


def _strides(x: Tensor | None, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if x is None else x.stride(i) for i in dims)
