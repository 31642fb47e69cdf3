"""Triton kernels of the scan per channel, backwards. With w and c = 1 - w the shares of a token and of its past in the
prior, r and o those in the posterior, and a prime for the real token before, x = key - gate - log total' are the log
odds of w, and

    mean = c mean' + w v,   d log total = c d(log total' + gate) + w d key,   dF = o dF' + r dv + (r - w) dx / beta

So what a token hands to the one before is linear in what it is handed. In reversed time a chunk maps the gradients of
(log total, mean, free) after it, (n, m, f), to (p n + x m + y f + n', p m + m', q f + f').

A token is dealt with when the real token before it has been found, so it waits while padding is passed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.channel_scan.triton_kernels import NOTHING, begin, token
from femixer.kernels.triton_math import shares
from femixer.kernels.triton_tokens import SIZES, lanes_of, tile_of


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
    mean = tl.load(MEAN + place, mask=real, other=0)
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
def summarise(
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
def carry(MAPS, TO_LAST, count, lanes, channels, HAS_TO_LAST: tl.constexpr, LANES: tl.constexpr):
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
