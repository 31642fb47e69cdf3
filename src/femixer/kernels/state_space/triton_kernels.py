"""Triton kernels of state spaces, in float32, parallel over batch, channels and chunks of time.

A program holds N modes of BLOCK channels: the decayed sums h of the streams 1, v and exp(beta v - top), where top
follows the largest exponent as it decays with the slowest mode. Chunks are first summarized from nothing, then `carry`
gives each the state before it, then each is read.

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
# Given as numbers: nothing is compiled anew for other sizes, with marks or without, or for what an encoder asks.
SIZES = ["T", "C", "chunks", "batch", "v_step", "marked", "by_total"]
# A total, or a sum of exponentials, below this is nothing.
TINY = tl.constexpr(1e-36)


@triton.jit
def channels(RATE, C, N, BLOCK: tl.constexpr, MODES: tl.constexpr):
    """Channels and modes of this program, which of them exist, the slowest log decay [BLOCK], the others' beyond it."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, MODES)
    there = (n < N)[:, None] & (c < C)[None, :]
    rate = tl.load(RATE + n[:, None] * C + c[None, :], mask=there, other=float("-inf")).to(tl.float32)
    slow = tl.where(c < C, tl.max(rate, 0), 0.0)
    return c, n, there, slow, tl.where(there, rate - slow[None, :], 0.0)


@triton.jit
def at(inside, flag):
    """Where both hold; flag is a number. (The interpreter cannot repeat a single truth value.)"""
    return inside.to(tl.int32) * flag > 0


@triton.jit
def token(V, STEP, MARKS, base, t, T, c, C, v_step, beta, marked, HAS_STEP: tl.constexpr):
    """value, step, exponent [BLOCK]; whether it is real (1 or 0, beyond the end 0), and whether it starts a segment."""
    row = base + t
    real = (t < T).to(tl.int32)
    mark = tl.load(MARKS + tl.minimum(row, base + T - 1) * marked).to(tl.int32) * marked
    real = real * (1 - (mark & PADDING))
    start = at(c >= 0, real * (mark & START))
    here = at(c < C, real)
    v = tl.load(V + row * v_step + c, mask=here, other=0.0).to(tl.float32)
    if HAS_STEP:
        step = tl.load(STEP + row * C + c, mask=here, other=0.0).to(tl.float32)
    else:
        step = tl.where(here, 1.0, 0.0)
    return v, step, tl.where(here, beta * v, NOTHING), real, start


@triton.jit
def amounts(AMOUNT, row, n, N, real, HAS: tl.constexpr):
    """write or read of a token [N]; writes are one where there is no tensor of them."""
    if HAS:
        amount = tl.load(AMOUNT + row * N + n, mask=at(n < N, real), other=0.0).to(tl.float32)
    else:
        amount = tl.where(at(n < N, real), 1.0, 0.0)
    return amount


@triton.jit
def risen(top, slow, step, exponent, start):
    """The top after a token, and the one before it, which a start forgets."""
    before = tl.where(start, NOTHING, top)
    return tl.maximum(tl.maximum(before + slow * step, exponent), NOTHING), before


@triton.jit
def decays(slow, step, before, top, start):
    """Of the slowest mode, over a token: for the streams 1 and v, and for the exponentials; [BLOCK] each."""
    slowest = tl.exp(slow * step)
    fall = before - top
    far = tl.exp(tl.minimum(before + slow * step - top, 0.0))
    fade = tl.where(fall < NEAR, slowest * tl.exp(tl.minimum(fall, NEAR)), far)
    return tl.where(start, 0.0, slowest), tl.where(start, 0.0, fade)


@triton.jit
def load_state(SUMS, place, C, N, c, n, there, FREE: tl.constexpr):
    """SUMS at `place` [3, N, C]."""
    corner = SUMS + place + n[:, None] * C + c[None, :]
    h0 = tl.load(corner, mask=there, other=0.0).to(tl.float32)
    h1 = tl.load(corner + N * C, mask=there, other=0.0).to(tl.float32)
    h2 = tl.zeros_like(h0)
    if FREE:
        h2 = tl.load(corner + 2 * N * C, mask=there, other=0.0).to(tl.float32)
    return h0, h1, h2


@triton.jit
def store_state(SUMS, place, C, N, c, n, there, h0, h1, h2):
    corner = SUMS + place + n[:, None] * C + c[None, :]
    tl.store(corner, h0, mask=there)
    tl.store(corner + N * C, h1, mask=there)
    tl.store(corner + 2 * N * C, h2, mask=there)


@triton.jit
def decayed(h0, h1, h2, lag, step, keep, fade, FREE: tl.constexpr):
    return lessened(h0, h1, h2, tl.exp(lag * step[None, :]), keep, fade, FREE)


@triton.jit
def lessened(h0, h1, h2, factor, keep, fade, FREE: tl.constexpr):
    """By the slowest mode's decays, and by a factor for what a mode decays beyond it."""
    decay = factor * keep[None, :]
    h0, h1 = h0 * decay, h1 * decay
    if FREE:
        h2 = h2 * (factor * fade[None, :])
    return h0, h1, h2


@triton.jit
def written(h0, h1, h2, write, step, v, energy, FREE: tl.constexpr):
    x = write[:, None] * step[None, :]
    h0, h1 = h0 + x, h1 + x * v[None, :]
    if FREE:
        h2 = h2 + x * energy[None, :]
    return h0, h1, h2


@triton.jit(do_not_specialize=SIZES)
def summarize(
    RATE, V, STEP, WRITE, BETA, MARKS, SUMS, TOPS, PACES, T, C, N, chunks, v_step, marked,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr,
    FREE: tl.constexpr, HAS_STEP: tl.constexpr, HAS_WRITE: tl.constexpr,
):  # fmt: skip
    """The state that a chunk leaves when it begins with nothing, its top, its steps together (-1: a segment starts)."""
    c, n, there, slow, lag = channels(RATE, C, N, BLOCK, MODES)
    place = tl.program_id(0).to(tl.int64)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
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
        v, step, exponent, real, start = token(V, STEP, MARKS, b * T, t, T, c, C, v_step, beta, marked, HAS_STEP)
        write = amounts(WRITE, row, n, N, real, HAS_WRITE)
        highest, before = risen(top, slow, step, exponent, start)
        keep, fade = decays(slow, step, before, highest, start)
        top = highest
        h0, h1, h2 = decayed(h0, h1, h2, lag, step, keep, fade, FREE)
        h0, h1, h2 = written(h0, h1, h2, write, step, v, tl.exp(exponent - top), FREE)
        pace += step
        reset = reset | start
    store_state(SUMS, place * 3 * N * C, C, N, c, n, there, h0, h1, h2)
    tl.store(TOPS + place * C + c, top, mask=c < C)
    tl.store(PACES + place * C + c, tl.where(reset, -1.0, pace), mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def carry(
    RATE, SUMS, TOPS, PACES, FIRST, FIRST_TOP, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """From the states that chunks leave alone to those before each of them, in their places."""
    c, n, there, slow, lag = channels(RATE, C, N, BLOCK, MODES)
    b = tl.program_id(0).to(tl.int64)
    h0, h1, h2 = load_state(FIRST, b * 3 * N * C, C, N, c, n, there, FREE)
    top = tl.maximum(tl.load(FIRST_TOP + b * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    for chunk in range(chunks):
        place = b * chunks + chunk
        own0, own1, own2 = load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
        highest = tl.load(TOPS + place * C + c, mask=c < C, other=0.0)
        pace = tl.load(PACES + place * C + c, mask=c < C, other=0.0)
        tl.debug_barrier()  # whoever holds a copy has read it before it is written
        store_state(SUMS, place * 3 * N * C, C, N, c, n, there, h0, h1, h2)
        tl.store(TOPS + place * C + c, top, mask=c < C)
        start = pace < 0
        pace = tl.maximum(pace, 0.0)
        local = highest
        highest, before = risen(top, slow, pace, local, start)
        keep, fade = decays(slow, pace, before, highest, start)
        top = highest
        h0, h1, h2 = decayed(h0, h1, h2, lag, pace, keep, fade, FREE)
        h0, h1 = h0 + own0, h1 + own1
        if FREE:
            h2 = h2 + own2 * tl.exp(local - top)[None, :]


@triton.jit(do_not_specialize=SIZES)
def read_chunks(
    RATE, V, STEP, WRITE, READ, WEIGHT, SKIP, BETA, MARKS, SUMS, TOPS, MEAN, FREE_ENERGY, LOG_TOTAL, LAST, LAST_TOP,
    T, C, N, chunks, v_step, marked,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr, HAS_STEP: tl.constexpr,
    HAS_WRITE: tl.constexpr, HAS_READ: tl.constexpr, INCLUSIVE: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """The results of a chunk's tokens, from the state before it; the last chunk also leaves the state after it."""
    c, n, there, slow, lag = channels(RATE, C, N, BLOCK, MODES)
    place = tl.program_id(0).to(tl.int64)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    beta = tl.full([BLOCK], 1.0, tl.float32)
    if FREE:
        beta = tl.load(BETA + c, mask=c < C, other=1.0).to(tl.float32)
    query = tl.zeros([MODES, BLOCK], tl.float32)
    own = tl.zeros([BLOCK], tl.float32)
    if not HAS_READ:
        query = tl.load(WEIGHT + n[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    if SKIPS:
        own = tl.load(SKIP + c, mask=c < C, other=0.0).to(tl.float32)
    h0, h1, h2 = load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
    top = tl.maximum(tl.load(TOPS + place * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
        row = b * T + t
        v, step, exponent, real, start = token(V, STEP, MARKS, b * T, t, T, c, C, v_step, beta, marked, HAS_STEP)
        write = amounts(WRITE, row, n, N, real, HAS_WRITE)
        if HAS_READ:
            read = amounts(READ, row, n, N, real, HAS_READ)
            query = tl.zeros([MODES, BLOCK], tl.float32) + read[:, None]
            if INCLUSIVE:
                own = tl.zeros([BLOCK], tl.float32) + tl.sum(read * write, 0)
        elif INCLUSIVE:
            own = tl.sum(query * write[:, None], 0)
        highest, before = risen(top, slow, step, exponent, start)
        keep, fade = decays(slow, step, before, highest, start)
        top = highest
        energy = tl.exp(exponent - top)
        h0, h1, h2 = decayed(h0, h1, h2, lag, step, keep, fade, FREE)
        weight = own * step
        y0 = tl.sum(query * h0, 0) + weight
        y1 = tl.sum(query * h1, 0) + weight * v
        nothing = y0 <= TINY  # written as <= so that NaN propagates
        total = tl.where(nothing, 1.0, y0)
        mean = tl.where(nothing, 0.0, y1 / total)
        log_total = tl.where(nothing, float("-inf"), tl.log(total))
        here = row * C + c
        shown = at(c < C, real)
        if FREE:
            y2 = tl.sum(query * h2, 0) + weight * energy
            unseen = nothing | (y2 <= TINY)
            free = (top + tl.log(tl.where(unseen, 1.0, y2) / total)) / beta
            free = tl.where(unseen | (free < mean), mean, free)
            tl.store(FREE_ENERGY + here, tl.where(shown, free, 0.0), mask=c < C)
        tl.store(MEAN + here, tl.where(shown, mean, 0.0), mask=c < C)
        tl.store(LOG_TOTAL + here, tl.where(shown, log_total, 0.0), mask=c < C)
        h0, h1, h2 = written(h0, h1, h2, write, step, v, energy, FREE)
    if chunk == chunks - 1:
        store_state(LAST, b * 3 * N * C, C, N, c, n, there, h0, h1, h2)
        tl.store(LAST_TOP + b * C + c, tl.where(top <= NOTHING, float("-inf"), top), mask=c < C)
