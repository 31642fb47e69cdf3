"""The conditioner's features by chunks of tokens: softplus, both sums, layer norm and product in one pass each way.

For the backward only what reaches each chunk is kept; the sums inside of chunks are computed again. A program holds all
channels of some chunks, tiles [GROUP, LANES]; see femixer.kernels.triton_tokens.

    h_t = d_t h_{t-1} + u_t,   later_t = e_t x_{t+1},   x_t = u_t + later_t

with d_t = e_t = sigmoid(-s_t), but d_t = 0 at a segment's first token, e_t = 0 at its last one; both are 1 and u_t = 0
at padding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_math import shares, softplus
from femixer.kernels.triton_tokens import SIZES, Chunks, lanes_of, rows, tile_of, unserved

READS_RESULTS = slice(-1, None)
# The most channels that a program holds.
WIDEST = 256


def refuse(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> str | None:
    channels = y.shape[2] // 3
    if channels > WIDEST:
        return f"{channels} channels are too many, {WIDEST} are the most"
    return unserved(y, initial) if y.shape[1] else "there is no token"


def _chunks(y: Tensor) -> Chunks:
    return Chunks(y.shape[0], y.shape[1], y.shape[2] // 3)


def results(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    """The last one has, per chunk, the product of the decays and the state before it; both ways, the same of later
    tokens."""
    batch, length, channels = y.shape[0], y.shape[1], y.shape[2] // 3
    sums = _chunks(y).summaries(2 if causal else 4, y.device)
    last = y.new_empty(batch, channels, dtype=torch.float32)
    return y.new_empty(batch, length, channels), last, sums


def _given(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool) -> tuple[Any, ...]:
    """y and its step, with y for marks and state that are not there, and what is there."""
    y, step = rows(y)
    there = {"HAS_MARKS": marks is not None, "CAUSAL": causal}
    known = y if marks is None else marks.contiguous(), y if initial is None else initial.contiguous()
    return y, *known, step, there, {"HAS_INITIAL": initial is not None}


def forward(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    made = found, last, sums = results(y, marks, initial, causal, eps)
    chunks, count = _chunks(y), found.numel()
    y, marks, initial, step, there, start = _given(y, marks, initial, causal)
    if chunks.count > 1:
        chunks.walk(summarise, y, marks, sums, step, **there, whole=True, exponentials=count)
        chunks.carry(carry, sums, initial, sums, **start, CAUSAL=causal, BACK=False)
    later = sums if causal else torch.empty(found.shape, dtype=torch.float32, device=y.device)
    operands = y, marks, initial, sums, later, found, last, step, eps
    chunks.walk(features, *operands, **there, **start, whole=True, exponentials=4 * count)
    return made


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    y, marks, initial, causal, eps = arguments
    (sums,), (batch, length, width) = results, y.shape
    chunks, shape = _chunks(y), (batch, length, width // 3)
    grad = y.new_zeros(shape) if grads[0] is None else grads[0].contiguous()
    to_last = grad if grads[1] is None else grads[1].contiguous()
    to_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    to_initial = None if initial is None else torch.empty_like(initial, memory_format=torch.contiguous_format)
    work = torch.empty(2 if causal else 4, *shape, dtype=torch.float32, device=y.device)
    ends = torch.empty_like(sums)
    y, marks, before, step, there, start = _given(y, marks, initial, causal)
    operands = y, marks, before, sums, grad, to_y, work, ends, step, eps
    chunks.walk(through_features, *operands, **there, **start, whole=True, exponentials=6 * grad.numel())
    if chunks.count > 1:
        end = {"HAS_INITIAL": grads[1] is not None}
        chunks.carry(carry, ends, to_last, sums, **end, CAUSAL=causal, BACK=True)
    operands = y, marks, before, to_last, to_y, to_y if to_initial is None else to_initial, work, ends, step
    end = {"HAS_TO_LAST": grads[1] is not None}
    chunks.walk(through_sums, *operands, **there, **start, **end, whole=True, exponentials=grad.numel())
    return to_y, None, to_initial


PADDING, START, END = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
# F.normalize's least norm.
LEAST = tl.constexpr(1e-12)


@triton.jit
def _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS: tl.constexpr):
    """d, e, u, and one minus the decay sigmoid(-s), which is zero at padding."""
    place = Y + row * step + channel[None, :]
    s = tl.load(place, mask=there, other=0).to(tl.float32)
    u = tl.load(place + channels, mask=there, other=0).to(tl.float32)
    lost, decay = shares(s)
    if HAS_MARKS:
        mark = tl.load(MARKS + row + 0 * channel[None, :], mask=there, other=1)
        padding = (mark & PADDING) != 0
        lost, decay, u = tl.where(padding, 0.0, lost), tl.where(padding, 1.0, decay), tl.where(padding, 0.0, u)
        return tl.where((mark & START) != 0, 0.0, decay), tl.where((mark & END) != 0, 0.0, decay), u, lost
    decay = tl.where(there, decay, 1.0)
    return decay, decay, u, lost


@triton.jit
def _features(Y, row, channel, channels, there, step, h, eps):
    """The logits of a, softplus(a) / |softplus(a)|, one over that length, LN(h) and one over its deviation."""
    a = tl.load(Y + row * step + 2 * channels + channel[None, :], mask=there, other=0).to(tl.float32)
    positive = tl.where(there, softplus(a), 0.0)
    shrink = 1 / tl.maximum(tl.sqrt(tl.sum(positive * positive, 1)), LEAST)[:, None]
    centred = tl.where(there, h - (tl.sum(tl.where(there, h, 0.0), 1) / channels)[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / channels + eps)[:, None]
    return a, positive * shrink, shrink, centred * scale, scale


@triton.jit(do_not_specialize=SIZES)
def summarise(
    Y, MARKS, SUMS, step, length, tokens, count, all_chunks, channels,
    HAS_MARKS: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of every chunk alone: the product of d and the last h; both ways, the product of e and the first x."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    h = tl.zeros([GROUP, LANES], tl.float32)
    x, product, ahead = h, h + 1, h + 1
    for i in tl.range(0, tokens, num_stages=3):
        there = inside & (first + i < length)[:, None]
        row = (b * length + first + i)[:, None]
        d, e, u, _ = _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS)
        h = d * h + u
        product *= d
        if not CAUSAL:
            x += ahead * u
            ahead *= e
    size = all_chunks.to(tl.int64) * channels
    tl.store(SUMS + summary, product, mask=inside)
    tl.store(SUMS + size + summary, h, mask=inside)
    if not CAUSAL:
        tl.store(SUMS + 2 * size + summary, ahead, mask=inside)
        tl.store(SUMS + 3 * size + summary, x, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def carry(
    SUMS, INITIAL, FACTORS, count, lanes, channels,
    HAS_INITIAL: tl.constexpr, CAUSAL: tl.constexpr, BACK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What reaches each chunk from those before it, and both ways from those after it, in place of the sums; BACK: of
    gradients, which go the other way. FACTORS: where the products are, laid out as SUMS."""
    inside, place, summary = lanes_of(count, lanes, channels, LANES)
    size = lanes.to(tl.int64) * count
    h = tl.zeros([LANES], tl.float32)
    x = h
    if HAS_INITIAL:
        h = tl.load(INITIAL + place, mask=inside, other=0).to(tl.float32)
    for i in tl.range(0, count, num_stages=3):
        at = summary + (count - 1 - i if BACK else i) * channels
        product = tl.load(FACTORS + at, mask=inside, other=0)
        total = tl.load(SUMS + size + at, mask=inside, other=0)
        tl.store(SUMS + size + at, h, mask=inside)
        h = product * h + total
    if not CAUSAL:
        for i in tl.range(0, count, num_stages=3):
            at = summary + (i if BACK else count - 1 - i) * channels
            product = tl.load(FACTORS + 2 * size + at, mask=inside, other=0)
            total = tl.load(SUMS + 3 * size + at, mask=inside, other=0)
            tl.store(SUMS + 3 * size + at, x, mask=inside)
            x = product * x + total


@triton.jit
def _begin(
    SUMS, INITIAL, count, all_chunks, channels, inside, summary, HAS_INITIAL: tl.constexpr, CAUSAL: tl.constexpr
):
    """h before each chunk and x after it."""
    h = tl.zeros_like(summary).to(tl.float32)
    x = h
    if count > 1:
        size = all_chunks.to(tl.int64) * channels
        h = tl.load(SUMS + size + summary, mask=inside, other=0)
        if not CAUSAL:
            x = tl.load(SUMS + 3 * size + summary, mask=inside, other=0)
    else:
        if HAS_INITIAL:
            h = tl.load(INITIAL + summary, mask=inside, other=0).to(tl.float32)
    return h, x


@triton.jit
def _look_ahead(
    Y, MARKS, LATER, b, first, channel, inside, x, step, length, tokens, channels, HAS_MARKS: tl.constexpr
):  # fmt: skip
    """LATER [B, T, C], from the last token of each chunk to its first one."""
    for i in tl.range(0, tokens, num_stages=3):
        t = first + tokens - 1 - i
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        _, e, u, _ = _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS)
        later = e * x
        tl.store(LATER + row * channels + channel[None, :], later, mask=there)
        x = tl.where(there, later + u, x)
    tl.debug_barrier()  # other threads may read it


@triton.jit(do_not_specialize=SIZES)
def features(
    Y, MARKS, INITIAL, SUMS, LATER, FEATURES, LAST, step, eps, length, tokens, count, all_chunks, channels,
    HAS_MARKS: tl.constexpr, HAS_INITIAL: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Features [B, T, C] and the last h [B, C]."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    h, x = _begin(SUMS, INITIAL, count, all_chunks, channels, inside, summary, HAS_INITIAL, CAUSAL)
    if not CAUSAL:
        _look_ahead(Y, MARKS, LATER, b, first, channel, inside, x, step, length, tokens, channels, HAS_MARKS)
    for i in tl.range(0, tokens, num_stages=3):
        there = inside & (first + i < length)[:, None]
        row = (b * length + first + i)[:, None]
        d, _, u, _ = _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS)
        h = d * h + u
        place = row * channels + channel[None, :]
        both = h
        if not CAUSAL:
            both += tl.load(LATER + place, mask=there, other=0)
        _, z, _, normal, _ = _features(Y, row, channel, channels, there, step, both, eps)
        share, _ = shares(z)
        tl.store(FEATURES + place, z * share * normal, mask=there)
    last = inside & (first + tokens >= length)[:, None]
    tl.store(LAST + b[:, None] * channels + channel[None, :], h, mask=last)


@triton.jit(do_not_specialize=SIZES)
def through_features(
    Y, MARKS, INITIAL, SUMS, GRAD, TO_Y, WORK, ENDS, step, eps, length, tokens, count, all_chunks, channels,
    HAS_MARKS: tl.constexpr, HAS_INITIAL: tl.constexpr, CAUSAL: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradients of a, into TO_Y, and of the sums; WORK [2 or 4, B, T, C] is left with these, with h and, both ways,
    with later. ENDS, laid out as SUMS, gets what each chunk alone hands to the one before, and both ways after it.

    Both norms, z = softplus(a) / |.| and LN(h), take out what points along their results.
    """
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    h, x = _begin(SUMS, INITIAL, count, all_chunks, channels, inside, summary, HAS_INITIAL, CAUSAL)
    size = all_chunks.to(tl.int64) // count * length * channels
    if not CAUSAL:
        LATER = WORK + 2 * size
        _look_ahead(Y, MARKS, LATER, b, first, channel, inside, x, step, length, tokens, channels, HAS_MARKS)
    before = tl.zeros([GROUP, LANES], tl.float32)
    after, product = before, before + 1
    for i in tl.range(0, tokens, num_stages=2):
        there = inside & (first + i < length)[:, None]
        row = (b * length + first + i)[:, None]
        d, e, u, _ = _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS)
        h = d * h + u
        place = row * channels + channel[None, :]
        both = h
        if not CAUSAL:
            both += tl.load(WORK + 2 * size + place, mask=there, other=0)
        a, z, shrink, normal, scale = _features(Y, row, channel, channels, there, step, both, eps)
        grad = tl.load(GRAD + place, mask=there, other=0).to(tl.float32)
        share, rest = shares(z)
        to_z = grad * normal * share * (1 + z * rest)
        to_z = (to_z - z * tl.sum(to_z * z, 1)[:, None]) * shrink
        slope, _ = shares(a)
        tl.store(TO_Y + row * 3 * channels + 2 * channels + channel[None, :], to_z * slope, mask=there)
        inner = grad * z * share
        along = tl.sum(inner, 1)[:, None] + normal * tl.sum(inner * normal, 1)[:, None]
        to_h = tl.where(there, (inner - along / channels) * scale, 0.0)
        tl.store(WORK + place, to_h, mask=there)
        tl.store(WORK + size + place, h, mask=there)
        product *= d
        before += product * to_h
        after = e * (after + to_h)
    if count > 1:
        chunks = all_chunks.to(tl.int64) * channels
        tl.store(ENDS + chunks + summary, before, mask=inside)
        if not CAUSAL:
            tl.store(ENDS + 3 * chunks + summary, after, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def through_sums(
    Y, MARKS, INITIAL, TO_LAST, TO_Y, TO_INITIAL, WORK, ENDS, step, length, tokens, count, all_chunks, channels,
    HAS_MARKS: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_TO_LAST: tl.constexpr, CAUSAL: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradients of s and u, into TO_Y, and of the initial state. A decay sigmoid(-s) has the derivative
    -decay (1 - decay)."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    start = b[:, None] * channels + channel[None, :]
    begins = inside & (first == 0)[:, None]
    initial = tl.zeros([GROUP, LANES], tl.float32)
    if HAS_INITIAL:
        initial = tl.load(INITIAL + start, mask=begins, other=0).to(tl.float32)
    size = all_chunks.to(tl.int64) // count * length * channels
    handed, onward = _begin(ENDS, TO_LAST, count, all_chunks, channels, inside, summary, HAS_TO_LAST, CAUSAL)
    if not CAUSAL:
        for i in tl.range(0, tokens, num_stages=2):
            there = inside & (first + i < length)[:, None]
            row = (b * length + first + i)[:, None]
            place = row * channels + channel[None, :]
            _, e, _, lost = _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS)
            to_h = tl.load(WORK + place, mask=there, other=0)
            later = tl.load(WORK + 2 * size + place, mask=there, other=0)
            error = onward + to_h
            tl.store(WORK + 3 * size + place, onward, mask=there)
            tl.store(WORK + 2 * size + place, -error * later * lost, mask=there)
            onward = tl.where(there, e * error, onward)
        tl.debug_barrier()
    for i in tl.range(0, tokens, num_stages=2):
        t = first + tokens - 1 - i
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        place = row * channels + channel[None, :]
        d, _, _, lost = _token(Y, MARKS, row, channel, channels, there, step, HAS_MARKS)
        to_h = tl.load(WORK + place, mask=there, other=0)
        before = tl.load(WORK + size + place - channels, mask=there & (t > 0)[:, None], other=0)
        before = tl.where((t > 0)[:, None], before, initial)
        error = handed + to_h
        handed = tl.where(there, d * error, handed)
        to_u = error
        to_s = -handed * before * lost
        if not CAUSAL:
            to_s += tl.load(WORK + 2 * size + place, mask=there, other=0)
            to_u += tl.load(WORK + 3 * size + place, mask=there, other=0)
        if HAS_MARKS:
            mark = tl.load(MARKS + row + 0 * channel[None, :], mask=there, other=1)
            to_u = tl.where((mark & PADDING) != 0, 0.0, to_u)
        target = TO_Y + row * 3 * channels + channel[None, :]
        tl.store(target, to_s, mask=there)
        tl.store(target + channels, to_u, mask=there)
    if HAS_INITIAL:
        tl.store(TO_INITIAL + start, handed, mask=begins)
