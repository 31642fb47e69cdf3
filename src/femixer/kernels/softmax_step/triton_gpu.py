"""The softmax step by two kernels: splits of the cache are read side by side, then combined.

A split's sums of exponentials are relative to the largest value that its query sees in it, per channel; so nothing that
is not seen decides, and only terms that lie 80 nats below the largest are lost.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.softmax import triton_call
from femixer.kernels.softmax.triton_call import padded, side_by_side
from femixer.kernels.softmax.triton_kernels import INF, LOG2E, load_tile, visible
from femixer.kernels.softmax.visibility import Visibility
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
    splits = min(-(-PROGRAMS // max(1, batch * groups)), -(-near // LEAST_KEYS))
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
        read_splits,
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
        # What spills no registers.
        num_warps=8 if key_width > 64 else 4,
        num_stages=1 if key_width <= 32 else 2,
    )
    launch(
        combine,
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


# Sums of exponentials below this have lost terms; F is then the mean.
LEAST = tl.constexpr(1e-27)


SIZES = ["S", "G", "splits", "start", "blocks", "window", "key_b", "key_g", "data_b", "data_g"]


@triton.jit(do_not_specialize=[*SIZES, "q_b", "k_b", "v_b", "bias_b", "bias_h", "bias_s", "seg_q", "seg_k"])
def read_splits(
    Q, K, V, KEY_CACHE, DATA_CACHE, SHIFT, BETAS, BIAS, SEG_Q, SEG_K, RANK,
    NEXT_SHIFT, TOPS, LOG_MAX, WEIGHT, MEAN, TOTAL,
    S, G, repeats, splits, start, blocks, window, key_width, width, scale,
    q_b, q_h, k_b, k_g, v_b, v_g, key_b, key_g, data_b, data_g, bias_b, bias_h, bias_s, seg_q, seg_k,
    BETA: tl.constexpr, WRITE: tl.constexpr, HAS_BIAS: tl.constexpr, SEGMENTS: tl.constexpr, WINDOW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program reads `blocks` blocks of keys for the heads of one key/value head; those of all programs begin at
    `start`. LOG_MAX, WEIGHT [B, splits, H], MEAN, TOTAL [B, splits, H, D], TOPS [B, splits, G, D]. The last one writes
    the token to the cache."""
    program = tl.program_id(0)
    pair, split = program // splits, program % splits
    batch, group = pair // G, pair % G
    H = G * repeats
    SEG_Q += batch.to(tl.int64) * seg_q
    SEG_K += batch.to(tl.int64) * seg_k
    RANK += batch.to(tl.int64) * S
    each = tl.arange(0, HEADS)
    head = group * repeats + each
    wide, channel = tl.arange(0, KEY_WIDTH), tl.arange(0, WIDTH)
    queries = Q + batch.to(tl.int64) * q_b + head.to(tl.int64)[:, None] * q_h + wide[None, :]
    q = tl.load(queries, mask=(each < repeats)[:, None] & (wide < key_width)[None, :], other=0)
    keys = KEY_CACHE + batch.to(tl.int64) * key_b + group.to(tl.int64) * key_g
    values = DATA_CACHE + batch.to(tl.int64) * data_b + group.to(tl.int64) * data_g
    slope = tl.full([WIDTH], 1, tl.float32)
    if BETA:
        slope = tl.load(BETAS + group * width + channel, mask=channel < width, other=1).to(tl.float32) * LOG2E
    new_key = tl.zeros([KEY_WIDTH], tl.float32)
    new_value = tl.zeros([WIDTH], tl.float32)
    if WRITE:
        K += batch.to(tl.int64) * k_b + group.to(tl.int64) * k_g
        V += batch.to(tl.int64) * v_b + group.to(tl.int64) * v_g
        new_key = tl.load(K + wide, mask=wide < key_width, other=0)
        new_value = tl.load(V + channel, mask=channel < width, other=0)
        if split == splits - 1:
            at = (S - 1).to(tl.int64)
            tl.store(keys + at * key_width + wide, new_key, mask=wide < key_width)
            tl.store(values + at * width + channel, new_value, mask=channel < width)
            shift = tl.load(SHIFT + pair.to(tl.int64) * width + channel, mask=channel < width, other=0)
            shift = tl.maximum(shift, new_value.to(shift.dtype))
            tl.store(NEXT_SHIFT + pair.to(tl.int64) * width + channel, shift, mask=channel < width)
    m = tl.full([HEADS], -INF, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    top = tl.full([WIDTH], -INF, tl.float32)
    mean = tl.zeros([HEADS, WIDTH], tl.float32)
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    held = S - 1 if WRITE else S  # in the cache: the new token may not be there yet
    for block in range(start + split * blocks, start + split * blocks + blocks):
        key = block * KEYS + tl.arange(0, KEYS)
        seen = visible(
            tl.zeros([1], tl.int32) + S - 1, key, SEG_Q, SEG_K, RANK, S - 1, 1, S, window, True, WINDOW, SEGMENTS
        )
        k = load_tile(keys, key, held, key_width, key_width, 1, KEY_WIDTH)
        v = load_tile(values, key, held, width, width, 1, WIDTH)
        if WRITE:
            newest = (key == S - 1)[:, None]
            k = tl.where(newest, new_key[None, :], k)
            v = tl.where(newest, new_value[None, :], v)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        if HAS_BIAS:
            here = (each < repeats)[:, None] & (key < S)[None, :]
            at = batch.to(tl.int64) * bias_b + head.to(tl.int64)[:, None] * bias_h + key[None, :] * bias_s
            x += tl.load(BIAS + at, mask=here, other=0).to(tl.float32) * LOG2E
        x = tl.where(seen[None, :], x, -INF)
        higher = tl.maximum(m, tl.max(x, 1))
        finite = tl.where(higher == -INF, 0.0, higher)
        p = tl.exp2(x - finite[:, None])
        kept = tl.exp2(m - finite)
        m = higher
        weight = weight * kept + tl.sum(p, 1)
        value = v.to(tl.float32)
        mean = tl.dot(p, value, mean * kept[:, None], input_precision=PRECISION)
        if BETA:
            above = tl.maximum(top, tl.max(tl.where(seen[:, None], value, -INF), 0))
            known = tl.where(above == -INF, 0.0, above)
            shrink = tl.where(top == -INF, 0.0, tl.exp2(slope * (tl.where(top == -INF, known, top) - known)))
            top = above
            e = tl.exp2(slope[None, :] * tl.minimum(value - known[None, :], 0.0))
            total = tl.dot(p, e, total * (kept[:, None] * shrink[None, :]), input_precision=PRECISION)
    at = (batch * splits + split).to(tl.int64) * H + head
    here = each < repeats
    tl.store(LOG_MAX + at, m, mask=here)
    tl.store(WEIGHT + at, weight, mask=here)
    inside = here[:, None] & (channel < width)[None, :]
    tl.store(MEAN + at[:, None] * width + channel[None, :], mean, mask=inside)
    if BETA:
        tl.store(TOTAL + at[:, None] * width + channel[None, :], total, mask=inside)
        at = ((batch * splits + split).to(tl.int64) * G + group) * width
        tl.store(TOPS + at + channel, top, mask=channel < width)


@triton.jit(do_not_specialize=["splits", "H"])
def combine(
    TOPS, LOG_MAX, WEIGHT, MEAN, TOTAL, BETAS, MEANS, FREES, splits, H, repeats, width,
    BETA: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """MEANS, FREES [B, 1, H, D] from the sums of the splits; a program for each batch and head."""
    program = tl.program_id(0)
    batch, head = program // H, program % H
    group, G = head // repeats, H // repeats
    channel = tl.arange(0, WIDTH)
    m = tl.full([SPLITS], -INF, tl.float32)
    for first in range(0, splits, SPLITS):
        each = first + tl.arange(0, SPLITS)
        at = (batch * splits + each).to(tl.int64) * H + head
        m = tl.maximum(m, tl.load(LOG_MAX + at, mask=each < splits, other=-INF))
    highest = tl.max(m, 0)
    highest = tl.where(highest == -INF, 0.0, highest)
    top = tl.full([WIDTH], -INF, tl.float32)
    slope = tl.full([WIDTH], 1, tl.float32)
    if BETA:
        slope = tl.load(BETAS + group * width + channel, mask=channel < width, other=1).to(tl.float32) * LOG2E
        for first in range(0, splits, SPLITS):
            each = first + tl.arange(0, SPLITS)
            at = ((batch * splits + each).to(tl.int64) * G + group)[:, None] * width + channel[None, :]
            inside = (each < splits)[:, None] & (channel < width)[None, :]
            top = tl.maximum(top, tl.max(tl.load(TOPS + at, mask=inside, other=-INF), 0))
    known = tl.where(top == -INF, 0.0, top)
    weight = tl.zeros([SPLITS], tl.float32)
    mean = tl.zeros([WIDTH], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, splits, SPLITS):
        each = first + tl.arange(0, SPLITS)
        at = (batch * splits + each).to(tl.int64) * H + head
        share = tl.exp2(tl.load(LOG_MAX + at, mask=each < splits, other=-INF) - highest)
        weight += share * tl.load(WEIGHT + at, mask=each < splits, other=0)
        inside = (each < splits)[:, None] & (channel < width)[None, :]
        sums = at[:, None] * width + channel[None, :]
        mean += tl.sum(share[:, None] * tl.load(MEAN + sums, mask=inside, other=0), 0)
        if BETA:
            places = ((batch * splits + each).to(tl.int64) * G + group)[:, None] * width + channel[None, :]
            tops = tl.load(TOPS + places, mask=inside, other=-INF)
            shrink = tl.exp2(slope[None, :] * tl.minimum(tops - known[None, :], 0.0))
            total += tl.sum(share[:, None] * shrink * tl.load(TOTAL + sums, mask=inside, other=0), 0)
    weight = tl.sum(weight, 0)
    share = 1 / tl.where(weight > 0, weight, 1.0)
    mean = mean * share
    at = program.to(tl.int64) * width + channel
    tl.store(MEANS + at, mean, mask=channel < width)
    if BETA:
        total = total * share
        free = known + tl.log2(tl.where(total > LEAST, total, 1.0)) / slope
        tl.store(FREES + at, tl.maximum(tl.where(total > LEAST, free, mean), mean), mask=channel < width)
