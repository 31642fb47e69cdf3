"""Triton kernels of state spaces, in float32, parallel over batch, channels and chunks of time.

A program holds N modes of BLOCK channels: the decayed sums h of the streams 1, v and exp(beta v - top), where top
follows the largest exponent as it decays with the slowest mode. Chunks are first summarized from nothing, then `carry`
gives each the state before it, then each is read. The backward computes states again: it keeps them in registers for
STRETCH tokens at a time.

    h_t = decay_t h_{t-1} + write_t x_t,    x_t = step_t (1, v_t, exp(beta v_t - top_t))
    y_t = sum_n read_t[n] decay_t[n] h_{t-1}[n] + own_t x_t

own_t: with which weight a row reads its own token: through the state sum_n read_t[n] write_t[n] (INCLUSIVE), or skip.
Layouts: rate, weight [N, C]; v, step, mean, free, log_total, top of tokens [B, T, C]; write, read [B, T, N]; marks
[B, T]; states [B, 3, N, C] and tops [B, C], those of chunks [B, chunks, 3, N, C] and [B, chunks, C].
"""

from __future__ import annotations

import triton
import triton.language as tl

PADDING, START = tl.constexpr(1), tl.constexpr(2)
# Below any exponent, and finite, so that differences are numbers.
NOTHING = tl.constexpr(-1e37)
# Up to so many nats the exponentials decay by the same rounded number as the other streams: their errors cancel then.
NEAR = tl.constexpr(40.0)
# A total, or a sum of exponentials, below this is nothing; exponents below its logarithm are beyond sight.
TINY, LOG_TINY = tl.constexpr(1e-36), tl.constexpr(-82.0)


@triton.jit
def _channels(RATE, C, N, BLOCK: tl.constexpr, MODES: tl.constexpr):
    """Channels and modes of this program, which of them exist, the slowest log decay [BLOCK], the others' beyond it."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, MODES)
    there = (n < N)[:, None] & (c < C)[None, :]
    rate = tl.load(RATE + n[:, None] * C + c[None, :], mask=there, other=float("-inf")).to(tl.float32)
    slow = tl.where(c < C, tl.max(rate, 0), 0.0)
    return c, n, there, slow, tl.where(there, rate - slow[None, :], 0.0)


@triton.jit
def _at(inside, flag):
    """Where both hold; flag is a number. (The interpreter cannot repeat a single truth value.)"""
    return inside.to(tl.int32) * flag > 0


@triton.jit
def _token(V, STEP, MARKS, base, t, T, c, C, beta, HAS_STEP: tl.constexpr, MARKED: tl.constexpr):
    """value, step, exponent [BLOCK]; whether it is real (1 or 0, beyond the end 0), and whether it starts a segment."""
    row = base + t
    real = (t < T).to(tl.int32)
    start = c < 0
    if MARKED:
        mark = tl.load(MARKS + tl.minimum(row, base + T - 1)).to(tl.int32)
        real = real * (1 - (mark & PADDING))
        start = _at(c >= 0, real * (mark & START))
    here = _at(c < C, real)
    v = tl.load(V + row * C + c, mask=here, other=0.0).to(tl.float32)
    if HAS_STEP:
        step = tl.load(STEP + row * C + c, mask=here, other=0.0).to(tl.float32)
    else:
        step = tl.where(here, 1.0, 0.0)
    return v, step, tl.where(here, beta * v, NOTHING), real, start


@triton.jit
def _amounts(AMOUNT, row, n, N, real, HAS: tl.constexpr):
    """write or read of a token [N]; writes are one where there is no tensor of them."""
    if HAS:
        amount = tl.load(AMOUNT + row * N + n, mask=_at(n < N, real), other=0.0).to(tl.float32)
    else:
        amount = tl.where(_at(n < N, real), 1.0, 0.0)
    return amount


@triton.jit
def _risen(top, slow, step, exponent, start):
    """The top after a token, and the one before it, which a start forgets."""
    before = tl.where(start, NOTHING, top)
    return tl.maximum(tl.maximum(before + slow * step, exponent), NOTHING), before


@triton.jit
def _decays(slow, step, before, top, start):
    """Of the slowest mode, over a token: for the streams 1 and v, and for the exponentials; [BLOCK] each."""
    slowest = tl.exp(slow * step)
    fall = before - top
    far = tl.exp(tl.minimum(before + slow * step - top, 0.0))
    fade = tl.where(fall < NEAR, slowest * tl.exp(tl.minimum(fall, NEAR)), far)
    return tl.where(start, 0.0, slowest), tl.where(start, 0.0, fade)


@triton.jit
def _load_state(SUMS, place, C, N, c, n, there, FREE: tl.constexpr):
    """SUMS at `place` [3, N, C]."""
    at = SUMS + place + n[:, None] * C + c[None, :]
    h0 = tl.load(at, mask=there, other=0.0).to(tl.float32)
    h1 = tl.load(at + N * C, mask=there, other=0.0).to(tl.float32)
    h2 = tl.zeros_like(h0)
    if FREE:
        h2 = tl.load(at + 2 * N * C, mask=there, other=0.0).to(tl.float32)
    return h0, h1, h2


@triton.jit
def _store_state(SUMS, place, C, N, c, n, there, h0, h1, h2):
    at = SUMS + place + n[:, None] * C + c[None, :]
    tl.store(at, h0, mask=there)
    tl.store(at + N * C, h1, mask=there)
    tl.store(at + 2 * N * C, h2, mask=there)


@triton.jit
def _decayed(h0, h1, h2, lag, step, keep, fade, FREE: tl.constexpr):
    factor = tl.exp(lag * step[None, :])
    decay = factor * keep[None, :]
    h0, h1 = h0 * decay, h1 * decay
    if FREE:
        h2 = h2 * (factor * fade[None, :])
    return h0, h1, h2


@triton.jit
def _written(h0, h1, h2, write, step, v, energy, FREE: tl.constexpr):
    x = write[:, None] * step[None, :]
    h0, h1 = h0 + x, h1 + x * v[None, :]
    if FREE:
        h2 = h2 + x * energy[None, :]
    return h0, h1, h2


@triton.jit(do_not_specialize=["T", "chunks"])
def summarize(
    RATE, V, STEP, WRITE, BETA, MARKS, SUMS, TOPS, PACES, T, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr,
    FREE: tl.constexpr, HAS_STEP: tl.constexpr, HAS_WRITE: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    """The state that a chunk leaves when it begins with nothing, its top, its steps together (-1: a segment starts)."""
    c, n, there, slow, lag = _channels(RATE, C, N, BLOCK, MODES)
    chunk, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    beta = tl.zeros([BLOCK], tl.float32)
    if FREE:
        beta = tl.load(BETA + c, mask=c < C, other=0.0).to(tl.float32)
    h0 = tl.zeros([MODES, BLOCK], tl.float32)
    h1 = tl.zeros([MODES, BLOCK], tl.float32)
    h2 = tl.zeros([MODES, BLOCK], tl.float32)
    top = tl.full([BLOCK], NOTHING, tl.float32)
    pace = tl.zeros([BLOCK], tl.float32)
    reset = c < 0
    for t in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
        row = b * T + t
        v, step, exponent, real, start = _token(V, STEP, MARKS, b * T, t, T, c, C, beta, HAS_STEP, MARKED)
        write = _amounts(WRITE, row, n, N, real, HAS_WRITE)
        highest, before = _risen(top, slow, step, exponent, start)
        keep, fade = _decays(slow, step, before, highest, start)
        top = highest
        h0, h1, h2 = _decayed(h0, h1, h2, lag, step, keep, fade, FREE)
        h0, h1, h2 = _written(h0, h1, h2, write, step, v, tl.exp(exponent - top), FREE)
        pace += step
        if MARKED:
            reset = reset | start
    place = b * chunks + chunk
    _store_state(SUMS, place * 3 * N * C, C, N, c, n, there, h0, h1, h2)
    tl.store(TOPS + place * C + c, top, mask=c < C)
    if MARKED:
        pace = tl.where(reset, -1.0, pace)
    tl.store(PACES + place * C + c, pace, mask=c < C)


@triton.jit(do_not_specialize=["chunks"])
def carry(
    RATE, SUMS, TOPS, PACES, FIRST, FIRST_TOP, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """From the states that chunks leave alone to those before each of them, in their places."""
    c, n, there, slow, lag = _channels(RATE, C, N, BLOCK, MODES)
    b = tl.program_id(1).to(tl.int64)
    h0, h1, h2 = _load_state(FIRST, b * 3 * N * C, C, N, c, n, there, FREE)
    top = tl.maximum(tl.load(FIRST_TOP + b * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    for chunk in range(chunks):
        place = b * chunks + chunk
        own0, own1, own2 = _load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
        highest = tl.load(TOPS + place * C + c, mask=c < C, other=0.0)
        pace = tl.load(PACES + place * C + c, mask=c < C, other=0.0)
        _store_state(SUMS, place * 3 * N * C, C, N, c, n, there, h0, h1, h2)
        tl.store(TOPS + place * C + c, top, mask=c < C)
        start = pace < 0
        pace = tl.maximum(pace, 0.0)
        local = highest
        highest, before = _risen(top, slow, pace, local, start)
        keep, fade = _decays(slow, pace, before, highest, start)
        top = highest
        h0, h1, h2 = _decayed(h0, h1, h2, lag, pace, keep, fade, FREE)
        h0, h1 = h0 + own0, h1 + own1
        if FREE:
            h2 = h2 + own2 * tl.exp(local - top)[None, :]


@triton.jit(do_not_specialize=["T", "chunks"])
def read_chunks(
    RATE, V, STEP, WRITE, READ, WEIGHT, SKIP, BETA, MARKS, SUMS, TOPS, MEAN, FREE_ENERGY, LOG_TOTAL, LAST, LAST_TOP,
    T, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr, HAS_STEP: tl.constexpr,
    HAS_WRITE: tl.constexpr, HAS_READ: tl.constexpr, MARKED: tl.constexpr, INCLUSIVE: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The results of a chunk's tokens, from the state before it; the last chunk also leaves the state after it."""
    c, n, there, slow, lag = _channels(RATE, C, N, BLOCK, MODES)
    chunk, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = b * chunks + chunk
    beta = tl.full([BLOCK], 1.0, tl.float32)
    if FREE:
        beta = tl.load(BETA + c, mask=c < C, other=1.0).to(tl.float32)
    query = tl.zeros([MODES, BLOCK], tl.float32)
    own = tl.zeros([BLOCK], tl.float32)
    if not HAS_READ:
        query = tl.load(WEIGHT + n[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    if SKIPS:
        own = tl.load(SKIP + c, mask=c < C, other=0.0).to(tl.float32)
    h0, h1, h2 = _load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
    top = tl.maximum(tl.load(TOPS + place * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
        row = b * T + t
        v, step, exponent, real, start = _token(V, STEP, MARKS, b * T, t, T, c, C, beta, HAS_STEP, MARKED)
        write = _amounts(WRITE, row, n, N, real, HAS_WRITE)
        if HAS_READ:
            read = _amounts(READ, row, n, N, real, HAS_READ)
            query = tl.zeros([MODES, BLOCK], tl.float32) + read[:, None]
            if INCLUSIVE:
                own = tl.zeros([BLOCK], tl.float32) + tl.sum(read * write, 0)
        elif INCLUSIVE:
            own = tl.sum(query * write[:, None], 0)
        highest, before = _risen(top, slow, step, exponent, start)
        keep, fade = _decays(slow, step, before, highest, start)
        top = highest
        energy = tl.exp(exponent - top)
        h0, h1, h2 = _decayed(h0, h1, h2, lag, step, keep, fade, FREE)
        weight = own * step
        y0 = tl.sum(query * h0, 0) + weight
        y1 = tl.sum(query * h1, 0) + weight * v
        nothing = y0 <= TINY  # written as <= so that NaN propagates
        total = tl.where(nothing, 1.0, y0)
        mean = tl.where(nothing, 0.0, y1 / total)
        log_total = tl.where(nothing, float("-inf"), tl.log(total))
        here = row * C + c
        shown = _at(c < C, real)
        if FREE:
            y2 = tl.sum(query * h2, 0) + weight * energy
            unseen = nothing | (y2 <= TINY)
            free = (top + tl.log(tl.where(unseen, 1.0, y2) / total)) / beta
            free = tl.where(unseen | (free < mean), mean, free)
            tl.store(FREE_ENERGY + here, tl.where(shown, free, 0.0), mask=c < C)
        tl.store(MEAN + here, tl.where(shown, mean, 0.0), mask=c < C)
        tl.store(LOG_TOTAL + here, tl.where(shown, log_total, 0.0), mask=c < C)
        h0, h1, h2 = _written(h0, h1, h2, write, step, v, energy, FREE)
    if chunk == chunks - 1:
        _store_state(LAST, b * 3 * N * C, C, N, c, n, there, h0, h1, h2)
        tl.store(LAST_TOP + b * C + c, tl.where(top <= NOTHING, float("-inf"), top), mask=c < C)


@triton.jit
def _slopes(
    MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, here, shown, beta, top,
    FREE: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr, BY_TOTAL: tl.constexpr,
):  # fmt: skip
    """Gradients of the sums y [BLOCK] of the three streams, and of beta through the logarithm, relative to top."""
    log_total = tl.load(LOG_TOTAL + here, mask=shown, other=0.0).to(tl.float32)
    shown = shown & (log_total > float("-inf"))
    mean = tl.load(MEAN + here, mask=shown, other=0.0).to(tl.float32)
    to_mean = tl.zeros_like(mean)
    to_total = tl.zeros_like(mean)
    to_free = tl.zeros_like(mean)
    if BY_MEAN:
        to_mean = tl.load(G_MEAN + here, mask=shown, other=0.0).to(tl.float32)
    if BY_TOTAL:
        to_total = tl.load(G_TOTAL + here, mask=shown, other=0.0).to(tl.float32)
    to_beta = tl.zeros_like(mean)
    d2 = tl.zeros_like(mean)
    inverse = tl.where(shown, tl.exp(-tl.where(shown, log_total, 0.0)), 0.0)
    if FREE and BY_FREE:
        to_free = tl.load(G_FREE + here, mask=shown, other=0.0).to(tl.float32)
        free = tl.load(FREE_ENERGY + here, mask=shown, other=0.0).to(tl.float32)
        # y2 = y0 exp(beta F - top); where it was beyond sight F is the mean, and so is its gradient.
        below = beta * free - top
        unseen = below + log_total < LOG_TINY
        to_mean += tl.where(unseen, to_free, 0.0)
        to_free = tl.where(unseen, 0.0, to_free)
        d2 = to_free / beta * tl.exp(-tl.where(unseen, 0.0, below)) * inverse
        to_beta = -to_free * below / (beta * beta)
    d1 = to_mean * inverse
    d0 = (to_total - to_mean * mean - to_free / beta) * inverse
    return d0, d1, d2, to_beta


@triton.jit(do_not_specialize=["T", "chunks"])
def adjoints(
    RATE, V, STEP, READ, WEIGHT, BETA, MARKS, TOPS, TOKEN_TOPS, MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL,
    BACK, T, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr, HAS_STEP: tl.constexpr,
    HAS_READ: tl.constexpr, MARKED: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr, BY_TOTAL: tl.constexpr,
):  # fmt: skip
    """The tops of a chunk's tokens, and the gradient of the state before the chunk by what the chunk reads of it."""
    c, n, there, slow, lag = _channels(RATE, C, N, BLOCK, MODES)
    chunk, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = b * chunks + chunk
    beta = tl.full([BLOCK], 1.0, tl.float32)
    if FREE:
        beta = tl.load(BETA + c, mask=c < C, other=1.0).to(tl.float32)
    first = tl.maximum(tl.load(TOPS + place * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    top = first
    for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
        row = b * T + t
        v, step, exponent, real, start = _token(V, STEP, MARKS, b * T, t, T, c, C, beta, HAS_STEP, MARKED)
        top, before = _risen(top, slow, step, exponent, start)
        tl.store(TOKEN_TOPS + row * C + c, top, mask=c < C)
    tl.debug_barrier()
    query = tl.zeros([MODES, BLOCK], tl.float32)
    if not HAS_READ:
        query = tl.load(WEIGHT + n[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    a0 = tl.zeros([MODES, BLOCK], tl.float32)
    a1 = tl.zeros([MODES, BLOCK], tl.float32)
    a2 = tl.zeros([MODES, BLOCK], tl.float32)
    for back in range(CHUNK):
        t = chunk * CHUNK + CHUNK - 1 - back
        row = b * T + t
        v, step, exponent, real, start = _token(V, STEP, MARKS, b * T, t, T, c, C, beta, HAS_STEP, MARKED)
        inside = _at(c < C, (t < T).to(tl.int32))
        later = _at(inside, tl.zeros([], tl.int32) + CHUNK - 1 - back)
        top = tl.load(TOKEN_TOPS + row * C + c, mask=inside, other=NOTHING)
        earlier = tl.load(TOKEN_TOPS + (row - 1) * C + c, mask=later, other=NOTHING)
        before = tl.where(start, NOTHING, tl.where(later, earlier, first))
        if HAS_READ:
            query = tl.zeros([MODES, BLOCK], tl.float32) + _amounts(READ, row, n, N, real, HAS_READ)[:, None]
        d0, d1, d2, _ = _slopes(
            MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, row * C + c, _at(c < C, real), beta, top,
            FREE, BY_MEAN, BY_FREE, BY_TOTAL,
        )  # fmt: skip
        keep, fade = _decays(slow, step, before, tl.where(inside, top, before), start)
        a0, a1, a2 = a0 + query * d0[None, :], a1 + query * d1[None, :], a2 + query * d2[None, :]
        a0, a1, a2 = _decayed(a0, a1, a2, lag, step, keep, fade, FREE)
    _store_state(BACK, place * 3 * N * C, C, N, c, n, there, a0, a1, a2)


@triton.jit(do_not_specialize=["chunks"])
def carry_back(
    RATE, BACK, TOPS, PACES, LAST_TOP, G_LAST, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, FREE: tl.constexpr, BY_LAST: tl.constexpr,
):  # fmt: skip
    """From each chunk's own part of the gradient of the state before it to the gradient of the state after it, by all
    that follows, in their places."""
    c, n, there, slow, lag = _channels(RATE, C, N, BLOCK, MODES)
    b = tl.program_id(1).to(tl.int64)
    a0 = tl.zeros([MODES, BLOCK], tl.float32)
    a1 = tl.zeros([MODES, BLOCK], tl.float32)
    a2 = tl.zeros([MODES, BLOCK], tl.float32)
    if BY_LAST:
        a0, a1, a2 = _load_state(G_LAST, b * 3 * N * C, C, N, c, n, there, FREE)
    later = tl.maximum(tl.load(LAST_TOP + b * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    for back in range(chunks):
        place = b * chunks + chunks - 1 - back
        own0, own1, own2 = _load_state(BACK, place * 3 * N * C, C, N, c, n, there, FREE)
        _store_state(BACK, place * 3 * N * C, C, N, c, n, there, a0, a1, a2)
        pace = tl.load(PACES + place * C + c, mask=c < C, other=0.0)
        top = tl.load(TOPS + place * C + c, mask=c < C, other=0.0)
        start = pace < 0
        pace = tl.maximum(pace, 0.0)
        keep, fade = _decays(slow, pace, tl.where(start, NOTHING, top), later, start)
        a0, a1, a2 = _decayed(a0, a1, a2, lag, pace, keep, fade, FREE)
        a0, a1, a2 = a0 + own0, a1 + own1, a2 + own2
        later = top


@triton.jit
def _stretch(
    RATES, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, before, beta, base, t, T, C, N, c, n,
    FREE: tl.constexpr, HAS_STEP: tl.constexpr, HAS_WRITE: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    """A token on: the decayed state that it reads, the state after it, and its top."""
    slow, lag = RATES
    row = base + t
    v, step, exponent, real, start = _token(V, STEP, MARKS, base, t, T, c, C, beta, HAS_STEP, MARKED)
    write = _amounts(WRITE, row, n, N, real, HAS_WRITE)
    inside = _at(c < C, (t < T).to(tl.int32))
    top = tl.where(inside, tl.load(TOKEN_TOPS + row * C + c, mask=inside, other=NOTHING), before)
    keep, fade = _decays(slow, step, tl.where(start, NOTHING, before), top, start)
    decayed = _decayed(h[0], h[1], h[2], lag, step, keep, fade, FREE)
    after = _written(decayed[0], decayed[1], decayed[2], write, step, v, tl.exp(exponent - top), FREE)
    return decayed, after, top


@triton.jit(do_not_specialize=["T", "chunks", "batch"])
def gradients(
    RATE, V, STEP, WRITE, READ, WEIGHT, SKIP, BETA, MARKS, SUMS, TOPS, TOKEN_TOPS, BACK,
    MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, LAST,
    D_RATE, D_STEP, D_WRITE, D_READ, D_WEIGHT, D_SKIP, D_V, D_BETA, D_FIRST, T, C, N, chunks, batch,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr, STRETCH: tl.constexpr, FREE: tl.constexpr,
    HAS_STEP: tl.constexpr, HAS_WRITE: tl.constexpr, HAS_READ: tl.constexpr, MARKED: tl.constexpr,
    INCLUSIVE: tl.constexpr, SKIPS: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr, BY_TOTAL: tl.constexpr,
):  # fmt: skip
    """Of a chunk, from the state before it and the gradient of the state after it. What is summed over channels, time
    or the batch is left in parts: D_WRITE, D_READ [blocks of channels, B, T, N]; D_RATE, D_WEIGHT [B, chunks, N, C];
    D_SKIP, D_BETA [B, chunks, C]."""
    c, n, there, slow, lag = _channels(RATE, C, N, BLOCK, MODES)
    chunk, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place, base = b * chunks + chunk, b * T
    rates = (slow, lag)
    beta = tl.full([BLOCK], 1.0, tl.float32)
    if FREE:
        beta = tl.load(BETA + c, mask=c < C, other=1.0).to(tl.float32)
    query = tl.zeros([MODES, BLOCK], tl.float32)
    own = tl.zeros([BLOCK], tl.float32)
    if not HAS_READ:
        query = tl.load(WEIGHT + n[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    if SKIPS:
        own = tl.load(SKIP + c, mask=c < C, other=0.0).to(tl.float32)
    first = tl.maximum(tl.load(TOPS + place * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    a0, a1, a2 = _load_state(BACK, place * 3 * N * C, C, N, c, n, there, FREE)
    to_rate = tl.zeros([MODES, BLOCK], tl.float32)
    to_weight = tl.zeros([MODES, BLOCK], tl.float32)
    to_skip = tl.zeros([BLOCK], tl.float32)
    to_beta = tl.zeros([BLOCK], tl.float32)
    if FREE and chunk == chunks - 1:
        _, _, last = _load_state(LAST, b * 3 * N * C, C, N, c, n, there, FREE)
        end = tl.load(TOKEN_TOPS + (base + T - 1) * C + c, mask=c < C, other=0.0)
        to_beta += tl.sum(a2 * last, 0) * end / beta
    for back in range(CHUNK // STRETCH):
        begin = chunk * CHUNK + CHUNK - (back + 1) * STRETCH
        h = _load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
        top = first
        for t in range(chunk * CHUNK, begin):
            _, h, top = _stretch(
                rates, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, top, beta, base, t, T, C, N, c, n,
                FREE, HAS_STEP, HAS_WRITE, MARKED,
            )  # fmt: skip
        seen = ()
        tops = (top,)
        for i in tl.static_range(STRETCH):
            decayed, h, top = _stretch(
                rates, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, top, beta, base, begin + i, T, C, N, c, n,
                FREE, HAS_STEP, HAS_WRITE, MARKED,
            )  # fmt: skip
            seen = seen + (decayed,)
            tops = tops + (top,)
        for i in tl.static_range(STRETCH):
            t = begin + STRETCH - 1 - i
            row = base + t
            v, step, exponent, real, start = _token(V, STEP, MARKS, b * T, t, T, c, C, beta, HAS_STEP, MARKED)
            write = _amounts(WRITE, row, n, N, real, HAS_WRITE)
            top = tops[STRETCH - i]
            here = _at(c < C, real)
            inside = _at(c < C, (t < T).to(tl.int32))
            modes = _at(n < N, (t < T).to(tl.int32))
            energy = tl.exp(exponent - top)
            d0, d1, d2, by_logarithm = _slopes(
                MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, row * C + c, here, beta, top,
                FREE, BY_MEAN, BY_FREE, BY_TOTAL,
            )  # fmt: skip
            if HAS_READ:
                read = _amounts(READ, row, n, N, real, HAS_READ)
                query = tl.zeros([MODES, BLOCK], tl.float32) + read[:, None]
                if INCLUSIVE:
                    own = tl.zeros([BLOCK], tl.float32) + tl.sum(read * write, 0)
            elif INCLUSIVE:
                own = tl.sum(query * write[:, None], 0)
            z0, z1, z2 = seen[STRETCH - 1 - i]
            x0, x1, x2 = step, step * v, step * energy
            along = x0 * d0 + x1 * d1 + x2 * d2
            by_state = z0 * d0[None, :] + z1 * d1[None, :] + z2 * d2[None, :]
            by_write = a0 * x0[None, :] + a1 * x1[None, :] + a2 * x2[None, :]
            if INCLUSIVE:
                by_write += query * along[None, :]
            if HAS_READ:
                by_read = by_state
                if INCLUSIVE:
                    by_read += write[:, None] * along[None, :]
                part = ((tl.program_id(0) * batch + b) * T + t) * N + n
                tl.store(D_READ + part, tl.sum(by_read, 1), mask=modes)
            else:
                to_weight += by_state
                if INCLUSIVE:
                    to_weight += write[:, None] * along[None, :]
            if HAS_WRITE:
                part = ((tl.program_id(0) * batch + b) * T + t) * N + n
                tl.store(D_WRITE + part, tl.sum(by_write, 1) * real, mask=modes)
            if SKIPS:
                to_skip += along
            e0 = tl.sum(write[:, None] * a0, 0) + own * d0
            e1 = tl.sum(write[:, None] * a1, 0) + own * d1
            e2 = tl.sum(write[:, None] * a2, 0) + own * d2
            a0, a1, a2 = a0 + query * d0[None, :], a1 + query * d1[None, :], a2 + query * d2[None, :]
            by_decay = a0 * z0 + a1 * z1 + a2 * z2
            to_rate += by_decay * step[None, :]
            if HAS_STEP:
                to_step = tl.sum(by_decay * (lag + slow[None, :]), 0) + e0 + e1 * v + e2 * energy
                tl.store(D_STEP + row * C + c, tl.where(here, to_step, 0.0), mask=inside)
            tl.store(D_V + row * C + c, tl.where(here, step * (e1 + beta * energy * e2), 0.0), mask=inside)
            before = tl.where(start, NOTHING, tops[STRETCH - 1 - i])
            # Exponents count from the token's top, so that large ones do not cancel; z2 went from one top to the next.
            to_beta += by_logarithm + e2 * x2 * tl.where(here, exponent - top, 0.0) / beta
            to_beta += tl.sum(a2 * z2, 0) * (before - top) / beta
            keep, fade = _decays(slow, step, before, top, start)
            a0, a1, a2 = _decayed(a0, a1, a2, lag, step, keep, fade, FREE)
    tl.store(D_RATE + place * N * C + n[:, None] * C + c[None, :], to_rate, mask=there)
    if not HAS_READ:
        tl.store(D_WEIGHT + place * N * C + n[:, None] * C + c[None, :], to_weight, mask=there)
    if SKIPS:
        tl.store(D_SKIP + place * C + c, to_skip, mask=c < C)
    if chunk == 0:
        _, _, z2 = _load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
        to_beta -= tl.sum(a2 * z2, 0) * first / beta
        _store_state(D_FIRST, b * 3 * N * C, C, N, c, n, there, a0, a1, a2)
    if FREE:
        tl.store(D_BETA + place * C + c, to_beta, mask=c < C)
