"""Triton kernels of the scan per channel. A sum of weights is total exp(top), with the largest of their logarithms as
top; what came before goes on as (top, total, log(total), mean, free energy) per channel.

Chunks and channels of a program are tiles [GROUP, LANES]; see femixer.kernels.triton_tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.triton_math import expm1, log1p
from femixer.kernels.triton_tokens import SIZES, lanes_of, tile_of

# The logarithm of nothing, and a gate that leaves nothing of the past, not even of nothing.
NOTHING, WIPED = tl.constexpr(-1e30), tl.constexpr(-1e35)
# Below this share a free energy takes logarithms.
FAR = tl.constexpr(60.0)
PADDING, START = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _join(top, total, log, mean, free, top2, total2, log2, mean2, free2, beta, cold, HAS_BETA: tl.constexpr):
    """Earlier and later tokens (2) together. With their shares c and w = 1 - c,

    mean = c mean' + w mean'',   exp(beta F) = c exp(beta F') + w exp(beta F'')
    """
    odds = top2 - top
    factor = tl.exp(-tl.abs(odds))
    old = total * tl.where(odds > 0, factor, 1.0)
    new = total2 * tl.where(odds > 0, 1.0, factor)
    both = old + new
    inverse = 1 / tl.where(both > 0, both, 1.0)
    c, w = old * inverse, new * inverse
    rise = mean2 - mean
    mean = tl.where(w > 0.5, mean2 - c * rise, mean + w * rise)
    if HAS_BETA:
        free = _free(free, free2, c, w, odds + log2 - log, total == 0, total2 == 0, beta, cold)
    return tl.maximum(top, top2), both, tl.log(tl.where(both > 0, both, 1.0)), mean, free


@triton.jit
def _free(free, free2, c, w, odds, is_first, is_last, beta, cold):
    """The free energy of both, relative to that of the one which has the larger part in it.

    odds = log(w / c), also where one of the shares is too small for a number.
    """
    lower = free2 < free
    depth = beta * tl.abs(free2 - free)
    low = tl.where(lower, w, c)  # the share of the one whose free energy is lower, and of the other
    high = tl.where(lower, c, w)
    low_odds = tl.where(lower, odds, -odds)
    low_leads = low_odds > depth
    far = tl.exp(-tl.abs(low_odds - depth))
    other = tl.where(low_leads, high, low) * expm1(tl.where(low_leads, tl.minimum(depth, FAR), -depth))
    other = tl.where(low_leads & (depth > FAR), far, other)
    # Only where the higher one leads with the smaller share, 1 + other would cancel.
    cancels = (low > 0.5) & (depth > 0.5) & (low_leads == 0)
    tiny = low_odds > FAR
    part = tl.log(tl.where(tiny, 1.0, tl.where(cancels, high, 1.0)) * (1 + far)) - tl.where(tiny, low_odds, 0.0)
    above = tl.where(cancels, part, log1p(tl.where(cancels, 0.0, other)))
    value = tl.where(low_leads == lower, free2, free) + cold * above
    return tl.where(is_first, free2, tl.where(is_last, free, value))


@triton.jit
def token(
    KEY, GATE, V, MARKS, row, channel, there, key_step, gate_step, v_step, marked,
    HAS_KEY: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Key, gate and value of a token per chunk, whether it is a real one and whether it starts a segment."""
    v = tl.load(V + row * v_step + channel[None, :], mask=there, other=0).to(tl.float32)
    key = tl.zeros_like(v)
    gate = tl.zeros_like(v)
    if HAS_KEY:
        key = tl.load(KEY + row * key_step + channel[None, :], mask=there, other=0).to(tl.float32)
    if HAS_GATE:
        gate = tl.load(GATE + row * gate_step + channel[None, :], mask=there, other=0).to(tl.float32)
    # The same mark for all channels, loaded as a tile so that it has the others' layout.
    mark = tl.load(MARKS + row + 0 * channel[None, :], mask=there & (0 * row + marked > 0), other=0)
    real = there & ((mark & PADDING) == 0)
    start = real & ((mark & START) != 0)
    return key, tl.where(real, gate, 0.0), tl.where(real, v, 0.0), real, start


@triton.jit
def _state(STATE, lanes, place, inside, HAS_BETA: tl.constexpr):
    """The state [3, B, C] as sums of weights; place: of a channel in [B, C]."""
    step = lanes.to(tl.int64)
    top = tl.load(STATE + place, mask=inside, other=0).to(tl.float32)
    mean = tl.load(STATE + step + place, mask=inside, other=0).to(tl.float32)
    free = tl.zeros_like(mean)
    if HAS_BETA:
        free = tl.load(STATE + 2 * step + place, mask=inside, other=0).to(tl.float32)
    nothing = top == float("-inf")
    return tl.where(nothing, NOTHING, top), tl.where(nothing, 0.0, 1.0), mean, free


@triton.jit
def begin(STATE, CARRY, count, all_chunks, channels, inside, summary, HAS_STATE: tl.constexpr, HAS_BETA: tl.constexpr):
    """What came before each chunk: the state, or where there are several chunks what `carry` left."""
    zero = tl.zeros_like(summary).to(tl.float32)
    top, total, mean, free = zero + NOTHING, zero, zero, zero
    if count > 1:
        step = all_chunks.to(tl.int64) * channels
        top = tl.load(CARRY + summary, mask=inside, other=0)
        total = tl.load(CARRY + step + summary, mask=inside, other=0)
        mean = tl.load(CARRY + 2 * step + summary, mask=inside, other=0)
        if HAS_BETA:
            free = tl.load(CARRY + 3 * step + summary, mask=inside, other=0)
    else:
        if HAS_STATE:
            top, total, mean, free = _state(STATE, all_chunks * channels, summary, inside, HAS_BETA)
    return top, total, tl.log(tl.where(total > 0, total, 1.0)), mean, free


@triton.jit(do_not_specialize=SIZES)
def summarise(
    KEY, GATE, V, BETA, MARKS, SUMMARY, key_step, gate_step, v_step, marked, length, tokens, count, all_chunks,
    channels, HAS_KEY: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BETA: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of every chunk alone: top, total, mean, free energy, and the sum of the gates; SUMMARY [5, B, chunks, C]."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    beta = tl.load(BETA + channel, mask=(channel < channels) & HAS_BETA, other=1).to(tl.float32)[None, :]
    zero = tl.zeros([GROUP, LANES], tl.float32)
    top, total, log, mean, free, reach = zero + NOTHING, zero, zero, zero, zero, zero
    for i in tl.range(0, tokens, num_stages=3):
        there = inside & (first + i < length)[:, None]
        row = (b * length + first + i)[:, None]
        key, gate, v, real, start = token(
            KEY, GATE, V, MARKS, row, channel, there, key_step, gate_step, v_step, marked, HAS_KEY, HAS_GATE
        )
        gate = tl.where(start, WIPED, gate)
        reach += gate
        top, total, log, mean, free = _join(
            top + gate, total, log, mean, free,
            tl.where(real, key, NOTHING), tl.where(real, 1.0, 0.0), zero, v, v, beta, 1 / beta, HAS_BETA,
        )  # fmt: skip
    step = all_chunks.to(tl.int64) * channels
    tl.store(SUMMARY + summary, top, mask=inside)
    tl.store(SUMMARY + step + summary, total, mask=inside)
    tl.store(SUMMARY + 2 * step + summary, mean, mask=inside)
    tl.store(SUMMARY + 3 * step + summary, free, mask=inside)
    tl.store(SUMMARY + 4 * step + summary, reach, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def carry(
    SUMMARY, BETA, STATE, count, lanes, channels, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """What came before each chunk, in place of its summary."""
    inside, place, summary = lanes_of(count, lanes, channels, LANES)
    beta = tl.load(BETA + place % channels, mask=inside & HAS_BETA, other=1).to(tl.float32)
    zero = tl.zeros([LANES], tl.float32)
    top, total, mean, free = zero + NOTHING, zero, zero, zero
    if HAS_STATE:
        top, total, mean, free = _state(STATE, lanes, place, inside, HAS_BETA)
    log = zero
    step = lanes.to(tl.int64) * count
    for i in tl.range(0, count, num_stages=3):
        at = SUMMARY + summary + i * channels
        top2 = tl.load(at, mask=inside, other=0)
        total2 = tl.load(at + step, mask=inside, other=0)
        mean2 = tl.load(at + 2 * step, mask=inside, other=0)
        free2 = tl.load(at + 3 * step, mask=inside, other=0)
        reach = tl.load(at + 4 * step, mask=inside, other=0)
        tl.store(at, top, mask=inside)
        tl.store(at + step, total, mask=inside)
        tl.store(at + 2 * step, mean, mask=inside)
        tl.store(at + 3 * step, free, mask=inside)
        log2 = tl.log(tl.where(total2 > 0, total2, 1.0))
        top, total, log, mean, free = _join(
            top + reach, total, log, mean, free, top2, total2, log2, mean2, free2, beta, 1 / beta, HAS_BETA
        )


@triton.jit(do_not_specialize=SIZES)
def read(
    KEY, GATE, V, BETA, MARKS, STATE, CARRY, MEAN, FREE, LOG, LAST, key_step, gate_step, v_step,
    marked, length, tokens, count, all_chunks, channels,
    HAS_KEY: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_STATE: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Mean, free energy and log total of every token [B, T, C], and the state after the last one [3, B, C]."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    beta = tl.load(BETA + channel, mask=(channel < channels) & HAS_BETA, other=1).to(tl.float32)[None, :]
    zero = tl.zeros([GROUP, LANES], tl.float32)
    top, total, log, mean, free = begin(STATE, CARRY, count, all_chunks, channels, inside, summary, HAS_STATE, HAS_BETA)
    for i in tl.range(0, tokens, num_stages=3):
        there = inside & (first + i < length)[:, None]
        row = (b * length + first + i)[:, None]
        key, gate, v, real, start = token(
            KEY, GATE, V, MARKS, row, channel, there, key_step, gate_step, v_step, marked, HAS_KEY, HAS_GATE
        )
        gate = tl.where(start, WIPED, gate)
        top, total, log, mean, free = _join(
            top + gate, total, log, mean, free,
            tl.where(real, key, NOTHING), tl.where(real, 1.0, 0.0), zero, v, v, beta, 1 / beta, HAS_BETA,
        )  # fmt: skip
        place = row * channels + channel[None, :]
        tl.store(MEAN + place, tl.where(real, mean, 0.0), mask=there)
        tl.store(LOG + place, tl.where(real, top + log, 0.0), mask=there)
        if HAS_BETA:
            tl.store(FREE + place, tl.where(real, tl.maximum(free, mean), 0.0), mask=there)
    last = inside & (first + tokens >= length)[:, None]
    place = b[:, None] * channels + channel[None, :]
    step = all_chunks.to(tl.int64) // count * channels
    tl.store(LAST + place, tl.where(total > 0, top + log, float("-inf")), mask=last)
    tl.store(LAST + step + place, mean, mask=last)
    tl.store(LAST + 2 * step + place, tl.maximum(free, mean) if HAS_BETA else free, mask=last)
