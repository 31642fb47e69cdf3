"""Triton kernels of the scan per channel. A sum of weights is total exp(top), with the largest of their logarithms as
top; what came before goes on as (top, total, log(total), mean, free energy) per channel.

Chunks and channels of a program are tiles [GROUP, LANES]; see femixer.kernels.triton_tokens.

Backwards: with w and c = 1 - w the shares of a token and of its past in the prior, r and o those in the posterior, and
a prime for the real token before, x = key - gate - log total' are the log odds of w, and

    mean = c mean' + w v,   d log total = c d(log total' + gate) + w d key,   dF = o dF' + r dv + (r - w) dx / beta

So what a token hands to the one before is linear in what it is handed. In reversed time a chunk maps the gradients of
(log total, mean, free) after it, (n, m, f), to (p n + x m + y f + n', p m + m', q f + f').

A token is dealt with when the real token before it has been found, so it waits while padding is passed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.triton_math import expm1, log1p, shares
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


@triton.jit
def _parts(key, gate, v, start, log, mean, free, beta, HAS_BETA: tl.constexpr):
    """w, c, r, o, and what a gradient of the mean and of the free energy gives to x, from the row before."""
    odds = key - gate - tl.where(start, NOTHING, log)
    w, c = shares(odds)
    r, o, to_odds = w, c, tl.zeros_like(w)
    if HAS_BETA:
        r, o = shares(odds + beta * (v - free))
        to_odds = (r - w) / beta
    return w, c, r, o, w * c * (v - mean), to_odds


@triton.jit
def _gradients(
    TO_MEAN, TO_FREE, TO_LOG, place, real, by_log, HAS_TO_MEAN: tl.constexpr, HAS_TO_FREE: tl.constexpr
):  # fmt: skip
    """Of a token's own results; zero for those that nobody used."""
    zero = tl.zeros_like(place).to(tl.float32)
    to_mean, to_free = zero, zero
    if HAS_TO_MEAN:
        to_mean = tl.load(TO_MEAN + place, mask=real, other=0).to(tl.float32)
    if HAS_TO_FREE:
        to_free = tl.load(TO_FREE + place, mask=real, other=0).to(tl.float32)
    to_log = tl.load(TO_LOG + place, mask=real & (0 * place + by_log > 0), other=0).to(tl.float32)
    return to_mean, to_free, to_log


@triton.jit
def _row(MEAN, FREE, LOG, place, real, HAS_BETA: tl.constexpr):
    log = tl.load(LOG + place, mask=real, other=0)
    mean = tl.load(MEAN + place, mask=real, other=0).to(tl.float32)
    free = mean
    if HAS_BETA:
        free = tl.load(FREE + place, mask=real, other=0)
    return log, mean, free


@triton.jit
def _extend(p, q, x, y, n, m, f, w, c, o, by_mean, by_free, to_log, to_mean, to_free):
    """A chunk's map with one more token before it."""
    at_mean, at_free = m + to_mean, f + to_free
    return (
        c * p, o * q, c * x - by_mean * p, c * y - by_free * q,
        c * (n + to_log) - by_mean * at_mean - by_free * at_free, c * at_mean, o * at_free,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def summarise_back(
    KEY, GATE, V, BETA, MARKS, STATE, CARRY, MEAN, FREE, LOG, TO_MEAN, TO_FREE, TO_LOG, MAPS,
    key_step, gate_step, v_step, marked, by_log, length, tokens, count, all_chunks, channels,
    HAS_KEY: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_TO_MEAN: tl.constexpr, HAS_TO_FREE: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The maps of all chunks: p, q, x, y, n', m', f' in MAPS [7, B, chunks, C]."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    beta = tl.load(BETA + channel, mask=(channel < channels) & HAS_BETA, other=1).to(tl.float32)[None, :]
    zero = tl.zeros([GROUP, LANES], tl.float32)
    p, q, x, y, n, m, f = zero + 1, zero + 1, zero, zero, zero, zero, zero
    key, gate, v, to_mean, to_free, to_log = zero, zero, zero, zero, zero, zero
    waits = inside & (summary < 0)
    start = waits
    for i in tl.range(0, tokens, num_stages=2):
        t = first + tokens - 1 - i
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        place = row * channels + channel[None, :]
        key_, gate_, v_, real, start_ = token(
            KEY, GATE, V, MARKS, row, channel, there, key_step, gate_step, v_step, marked, HAS_KEY, HAS_GATE
        )
        log, mean, free = _row(MEAN, FREE, LOG, place, real, HAS_BETA)
        w, c, _, o, by_mean, by_free = _parts(key, gate, v, start, log, mean, free, beta, HAS_BETA)
        p_, q_, x_, y_, n_, m_, f_ = _extend(p, q, x, y, n, m, f, w, c, o, by_mean, by_free, to_log, to_mean, to_free)
        found = waits & real
        p, q, x, y = tl.where(found, p_, p), tl.where(found, q_, q), tl.where(found, x_, x), tl.where(found, y_, y)
        n, m, f = tl.where(found, n_, n), tl.where(found, m_, m), tl.where(found, f_, f)
        to_mean_, to_free_, to_log_ = _gradients(
            TO_MEAN, TO_FREE, TO_LOG, place, real, by_log, HAS_TO_MEAN, HAS_TO_FREE
        )
        key, gate, v = tl.where(real, key_, key), tl.where(real, gate_, gate), tl.where(real, v_, v)
        to_mean, to_free = tl.where(real, to_mean_, to_mean), tl.where(real, to_free_, to_free)
        to_log = tl.where(real, to_log_, to_log)
        start = (real & start_) | ((real == 0) & start)
        waits = waits | real
    top, _, log, mean, free = begin(STATE, CARRY, count, all_chunks, channels, inside, summary, HAS_STATE, HAS_BETA)
    w, c, _, o, by_mean, by_free = _parts(key, gate, v, start, top + log, mean, free, beta, HAS_BETA)
    p_, q_, x_, y_, n_, m_, f_ = _extend(p, q, x, y, n, m, f, w, c, o, by_mean, by_free, to_log, to_mean, to_free)
    step = all_chunks.to(tl.int64) * channels
    MAPS += summary
    tl.store(MAPS, tl.where(waits, p_, p), mask=inside)
    tl.store(MAPS + step, tl.where(waits, q_, q), mask=inside)
    tl.store(MAPS + 2 * step, tl.where(waits, x_, x), mask=inside)
    tl.store(MAPS + 3 * step, tl.where(waits, y_, y), mask=inside)
    tl.store(MAPS + 4 * step, tl.where(waits, n_, n), mask=inside)
    tl.store(MAPS + 5 * step, tl.where(waits, m_, m), mask=inside)
    tl.store(MAPS + 6 * step, tl.where(waits, f_, f), mask=inside)


@triton.jit
def _handed(TO_LAST, lanes, place, inside, HAS_TO_LAST: tl.constexpr):
    """Gradients of the state after the last token."""
    n = tl.zeros_like(place).to(tl.float32)
    m, f = n, n
    if HAS_TO_LAST:
        step = lanes.to(tl.int64)
        n = tl.load(TO_LAST + place, mask=inside, other=0).to(tl.float32)
        m = tl.load(TO_LAST + step + place, mask=inside, other=0).to(tl.float32)
        f = tl.load(TO_LAST + 2 * step + place, mask=inside, other=0).to(tl.float32)
    return n, m, f


@triton.jit(do_not_specialize=SIZES)
def carry_back(MAPS, TO_LAST, count, lanes, channels, HAS_TO_LAST: tl.constexpr, LANES: tl.constexpr):
    """What each chunk is handed from those after it, in place of n', m', f'."""
    inside, place, summary = lanes_of(count, lanes, channels, LANES)
    n, m, f = _handed(TO_LAST, lanes, place, inside, HAS_TO_LAST)
    step = lanes.to(tl.int64) * count
    for i in tl.range(0, count, num_stages=3):
        at = MAPS + summary + (count - 1 - i) * channels
        p = tl.load(at, mask=inside, other=0)
        q = tl.load(at + step, mask=inside, other=0)
        x = tl.load(at + 2 * step, mask=inside, other=0)
        y = tl.load(at + 3 * step, mask=inside, other=0)
        n_ = tl.load(at + 4 * step, mask=inside, other=0)
        m_ = tl.load(at + 5 * step, mask=inside, other=0)
        f_ = tl.load(at + 6 * step, mask=inside, other=0)
        tl.store(at + 4 * step, n, mask=inside)
        tl.store(at + 5 * step, m, mask=inside)
        tl.store(at + 6 * step, f, mask=inside)
        n = p * n + x * m + y * f + n_
        m = p * m + m_
        f = q * f + f_


@triton.jit
def _retreat(
    D_KEY, D_GATE, D_V, place, found, n, m, f, spent, key, gate, v, now, start, to_mean, to_free, to_log,
    log, mean, free, beta, HAS_KEY: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BETA: tl.constexpr,
):  # fmt: skip
    """Go back by a token, where the one before it was found: write its gradients, and hand on what is left."""
    w, c, r, o, by_mean, by_free = _parts(key, gate, v, start, log, mean, free, beta, HAS_BETA)
    at_log, at_mean, at_free = n + to_log, m + to_mean, f + to_free
    to_odds = by_mean * at_mean
    to_v = w * at_mean
    if HAS_BETA:
        to_odds += by_free * at_free
        to_v += r * at_free
        shift = at_free / beta * (r * (v - now) + o * (tl.where(start, now, free) - now))
        spent += tl.where(found, shift, 0.0)
        f = tl.where(found, o * at_free, f)
    left = c * at_log - to_odds
    tl.store(D_V + place, to_v, mask=found)
    if HAS_KEY:
        tl.store(D_KEY + place, w * at_log + to_odds, mask=found)
    if HAS_GATE:
        tl.store(D_GATE + place, left, mask=found)
    return tl.where(found, left, n), tl.where(found, c * at_mean, m), f, spent


@triton.jit(do_not_specialize=SIZES)
def gradients(
    KEY, GATE, V, BETA, MARKS, STATE, CARRY, MEAN, FREE, LOG, TO_MEAN, TO_FREE, TO_LOG, MAPS,
    TO_LAST, D_KEY, D_GATE, D_V, D_BETA, D_STATE,
    key_step, gate_step, v_step, marked, by_log, length, tokens, count, all_chunks, channels,
    HAS_KEY: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_TO_MEAN: tl.constexpr, HAS_TO_FREE: tl.constexpr,
    HAS_TO_LAST: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gradients of key, gate and v [B, T, C], of beta by chunks [B, chunks, C], and of the state [3, B, C]."""
    b, first, channel, inside, summary = tile_of(tokens, count, all_chunks, channels, GROUP, LANES)
    beta = tl.load(BETA + channel, mask=(channel < channels) & HAS_BETA, other=1).to(tl.float32)[None, :]
    zero = tl.zeros([GROUP, LANES], tl.float32)
    step = all_chunks.to(tl.int64) * channels
    if count > 1:
        n = tl.load(MAPS + 4 * step + summary, mask=inside, other=0)
        m = tl.load(MAPS + 5 * step + summary, mask=inside, other=0)
        f = tl.load(MAPS + 6 * step + summary, mask=inside, other=0)
    else:
        n, m, f = _handed(TO_LAST, all_chunks * channels, summary, inside, HAS_TO_LAST)
    key, gate, v, now, to_mean, to_free, to_log, spent = zero, zero, zero, zero, zero, zero, zero, zero
    waits = inside & (summary < 0)
    start = waits
    at = summary
    for i in tl.range(0, tokens, num_stages=2):
        t = first + tokens - 1 - i
        there = inside & (t < length)[:, None]
        row = (b * length + t)[:, None]
        place = row * channels + channel[None, :]
        key_, gate_, v_, real, start_ = token(
            KEY, GATE, V, MARKS, row, channel, there, key_step, gate_step, v_step, marked, HAS_KEY, HAS_GATE
        )
        log, mean, free = _row(MEAN, FREE, LOG, place, real, HAS_BETA)
        n, m, f, spent = _retreat(
            D_KEY, D_GATE, D_V, at, waits & real, n, m, f, spent, key, gate, v, now, start, to_mean, to_free, to_log,
            log, mean, free, beta, HAS_KEY, HAS_GATE, HAS_BETA,
        )  # fmt: skip
        padding = there & (real == 0)
        tl.store(D_V + place, zero, mask=padding)
        if HAS_KEY:
            tl.store(D_KEY + place, zero, mask=padding)
        if HAS_GATE:
            tl.store(D_GATE + place, zero, mask=padding)
        to_mean_, to_free_, to_log_ = _gradients(
            TO_MEAN, TO_FREE, TO_LOG, place, real, by_log, HAS_TO_MEAN, HAS_TO_FREE
        )
        key, gate, v = tl.where(real, key_, key), tl.where(real, gate_, gate), tl.where(real, v_, v)
        to_mean, to_free = tl.where(real, to_mean_, to_mean), tl.where(real, to_free_, to_free)
        to_log, now, at = tl.where(real, to_log_, to_log), tl.where(real, free, now), tl.where(real, place, at)
        start = (real & start_) | ((real == 0) & start)
        waits = waits | real
    top, _, log, mean, free = begin(STATE, CARRY, count, all_chunks, channels, inside, summary, HAS_STATE, HAS_BETA)
    n, m, f, spent = _retreat(
        D_KEY, D_GATE, D_V, at, waits, n, m, f, spent, key, gate, v, now, start, to_mean, to_free, to_log,
        top + log, mean, free, beta, HAS_KEY, HAS_GATE, HAS_BETA,
    )  # fmt: skip
    if HAS_BETA:
        tl.store(D_BETA + summary, spent, mask=inside)
    if HAS_STATE:
        place = D_STATE + b[:, None] * channels + channel[None, :]
        step = all_chunks.to(tl.int64) // count * channels
        begins = inside & (first == 0)[:, None]
        tl.store(place, n, mask=begins)
        tl.store(place + step, m, mask=begins)
        tl.store(place + 2 * step, f if HAS_BETA else zero, mask=begins)
