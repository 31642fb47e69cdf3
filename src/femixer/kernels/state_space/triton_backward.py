"""Triton kernels of the backward of state spaces; letters and layouts as in `triton_kernels`.

Chunks first find the gradient of the state before them by what they read of it, `carry_back` adds what follows them,
and `gradients` goes through a chunk backwards. It computes states again, for STRETCH tokens at a time in registers,
from the states before every STOP tokens, which it holds in registers too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.state_space.triton_kernels import (
    NOTHING,
    SIZES,
    amounts,
    at,
    channels,
    decayed,
    decays,
    lessened,
    load_state,
    risen,
    store_state,
    token,
    written,
)

# The logarithm of a sum of exponentials that is beyond sight.
LOG_TINY = tl.constexpr(-82.0)


@triton.jit
def slopes(
    MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, here, shown, beta, top, by_total,
    FREE: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Gradients of the sums y [BLOCK] of the three streams, and of beta through the logarithm, relative to top."""
    log_total = tl.load(LOG_TOTAL + here, mask=shown, other=0.0).to(tl.float32)
    shown = shown & (log_total > float("-inf"))
    mean = tl.load(MEAN + here, mask=shown, other=0.0).to(tl.float32)
    to_mean = tl.zeros_like(mean)
    to_free = tl.zeros_like(mean)
    if BY_MEAN:
        to_mean = tl.load(G_MEAN + here, mask=shown, other=0.0).to(tl.float32)
    to_total = tl.load(G_TOTAL + here, mask=at(shown, by_total), other=0.0).to(tl.float32)
    to_beta = tl.zeros_like(mean)
    d2 = tl.zeros_like(mean)
    inverse = tl.where(shown, tl.exp(-tl.where(shown, log_total, 0.0)), 0.0)
    if FREE and BY_FREE:
        to_free = tl.load(G_FREE + here, mask=shown, other=0.0).to(tl.float32)
        free = tl.load(FREE_ENERGY + here, mask=shown, other=0.0).to(tl.float32)
        # y2 = y0 exp(beta F - top); where it, or its part of y0, is beyond sight the gradient is that of the mean.
        below = beta * free - top
        unseen = below + tl.minimum(log_total, 0.0) < LOG_TINY
        to_mean += tl.where(unseen, to_free, 0.0)
        to_free = tl.where(unseen, 0.0, to_free)
        d2 = to_free / beta * tl.exp(-tl.where(unseen, 0.0, below)) * inverse
        to_beta = -to_free * below / (beta * beta)
    d1 = to_mean * inverse
    d0 = (to_total - to_mean * mean - to_free / beta) * inverse
    return d0, d1, d2, to_beta


@triton.jit(do_not_specialize=SIZES)
def adjoints(
    RATE, V, STEP, READ, WEIGHT, BETA, MARKS, TOPS, TOKEN_TOPS, MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL,
    BACK, T, C, N, chunks, v_step, marked, by_total,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr, HAS_STEP: tl.constexpr,
    HAS_READ: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """The tops of a chunk's tokens, and the gradient of the state before the chunk by what the chunk reads of it."""
    c, n, there, slow, lag = channels(RATE, C, N, BLOCK, MODES)
    place = tl.program_id(0).to(tl.int64)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    beta = tl.full([BLOCK], 1.0, tl.float32)
    if FREE:
        beta = tl.load(BETA + c, mask=c < C, other=1.0).to(tl.float32)
    first = tl.maximum(tl.load(TOPS + place * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    top = first
    for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
        row = b * T + t
        v, step, exponent, real, start = token(V, STEP, MARKS, b * T, t, T, c, C, v_step, beta, marked, HAS_STEP)
        top, before = risen(top, slow, step, exponent, start)
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
        v, step, exponent, real, start = token(V, STEP, MARKS, b * T, t, T, c, C, v_step, beta, marked, HAS_STEP)
        inside = at(c < C, (t < T).to(tl.int32))
        later = at(inside, tl.zeros([], tl.int32) + CHUNK - 1 - back)
        top = tl.load(TOKEN_TOPS + row * C + c, mask=inside, other=NOTHING)
        earlier = tl.load(TOKEN_TOPS + (row - 1) * C + c, mask=later, other=NOTHING)
        before = tl.where(start, NOTHING, tl.where(later, earlier, first))
        if HAS_READ:
            query = tl.zeros([MODES, BLOCK], tl.float32) + amounts(READ, row, n, N, real, HAS_READ)[:, None]
        d0, d1, d2, _ = slopes(
            MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, row * C + c, at(c < C, real), beta, top,
            by_total, FREE, BY_MEAN, BY_FREE,
        )  # fmt: skip
        keep, fade = decays(slow, step, before, tl.where(inside, top, before), start)
        a0, a1, a2 = a0 + query * d0[None, :], a1 + query * d1[None, :], a2 + query * d2[None, :]
        a0, a1, a2 = decayed(a0, a1, a2, lag, step, keep, fade, FREE)
    store_state(BACK, place * 3 * N * C, C, N, c, n, there, a0, a1, a2)


@triton.jit(do_not_specialize=SIZES)
def carry_back(
    RATE, BACK, TOPS, PACES, LAST_TOP, G_LAST, C, N, chunks,
    BLOCK: tl.constexpr, MODES: tl.constexpr, FREE: tl.constexpr, BY_LAST: tl.constexpr,
):  # fmt: skip
    """From each chunk's own part of the gradient of the state before it to the gradient of the state after it, by all
    that follows, in their places."""
    c, n, there, slow, lag = channels(RATE, C, N, BLOCK, MODES)
    b = tl.program_id(0).to(tl.int64)
    a0 = tl.zeros([MODES, BLOCK], tl.float32)
    a1 = tl.zeros([MODES, BLOCK], tl.float32)
    a2 = tl.zeros([MODES, BLOCK], tl.float32)
    if BY_LAST:
        a0, a1, a2 = load_state(G_LAST, b * 3 * N * C, C, N, c, n, there, FREE)
    later = tl.maximum(tl.load(LAST_TOP + b * C + c, mask=c < C, other=0.0).to(tl.float32), NOTHING)
    for back in range(chunks):
        place = b * chunks + chunks - 1 - back
        own0, own1, own2 = load_state(BACK, place * 3 * N * C, C, N, c, n, there, FREE)
        tl.debug_barrier()  # whoever holds a copy has read it before it is written
        store_state(BACK, place * 3 * N * C, C, N, c, n, there, a0, a1, a2)
        pace = tl.load(PACES + place * C + c, mask=c < C, other=0.0)
        top = tl.load(TOPS + place * C + c, mask=c < C, other=0.0)
        start = pace < 0
        pace = tl.maximum(pace, 0.0)
        keep, fade = decays(slow, pace, tl.where(start, NOTHING, top), later, start)
        a0, a1, a2 = decayed(a0, a1, a2, lag, pace, keep, fade, FREE)
        a0, a1, a2 = a0 + own0, a1 + own1, a2 + own2
        later = top


@triton.jit
def stretch(
    RATES, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, before, beta, base, t, T, C, N, c, n, v_step, marked,
    FREE: tl.constexpr, HAS_STEP: tl.constexpr, HAS_WRITE: tl.constexpr,
):  # fmt: skip
    """A token on: the decayed state that it reads, and by which factor modes decayed; the state after it; its top."""
    slow, lag = RATES
    row = base + t
    v, step, exponent, real, start = token(V, STEP, MARKS, base, t, T, c, C, v_step, beta, marked, HAS_STEP)
    write = amounts(WRITE, row, n, N, real, HAS_WRITE)
    inside = at(c < C, (t < T).to(tl.int32))
    top = tl.where(inside, tl.load(TOKEN_TOPS + row * C + c, mask=inside, other=NOTHING), before)
    keep, fade = decays(slow, step, tl.where(start, NOTHING, before), top, start)
    factor = tl.exp(lag * step[None, :])
    z0, z1, z2 = lessened(h[0], h[1], h[2], factor, keep, fade, FREE)
    after = written(z0, z1, z2, write, step, v, tl.exp(exponent - top), FREE)
    return (z0, z1, z2, factor), after, top


@triton.jit
def _store_part(AMOUNTS, amount, b, t, batch, T, n, N, inside, ADDED: tl.constexpr):
    """What this block of channels has of a token's amounts [N]: added in memory, or side by side with the others'."""
    if ADDED:
        tl.atomic_add(AMOUNTS + (b * T + t) * N + n, amount, mask=inside, sem="relaxed")
    else:
        tl.store(AMOUNTS + ((tl.program_id(1) * batch + b) * T + t) * N + n, amount, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def gradients(
    RATE, V, STEP, WRITE, READ, WEIGHT, SKIP, BETA, MARKS, SUMS, TOPS, TOKEN_TOPS, BACK,
    MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, LAST,
    D_RATE, D_STEP, D_WRITE, D_READ, D_WEIGHT, D_SKIP, D_V, D_BETA, D_FIRST, T, C, N, chunks, batch,
    v_step, marked, by_total,
    BLOCK: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr, STRETCH: tl.constexpr, STOP: tl.constexpr,
    FREE: tl.constexpr, HAS_STEP: tl.constexpr, HAS_WRITE: tl.constexpr, HAS_READ: tl.constexpr,
    INCLUSIVE: tl.constexpr, SKIPS: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Of a chunk, from the state before it and the gradient of the state after it. What is summed over channels, time
    or the batch is left in parts: D_RATE, D_WEIGHT [B, chunks, N, C]; D_SKIP, D_BETA [B, chunks, C]; and D_WRITE,
    D_READ [blocks of channels, B, T, N] unless ADDED: then blocks add theirs to [B, T, N], in the order they come."""
    c, n, there, slow, lag = channels(RATE, C, N, BLOCK, MODES)
    place = tl.program_id(0).to(tl.int64)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    base = b * T
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
    a0, a1, a2 = load_state(BACK, place * 3 * N * C, C, N, c, n, there, FREE)
    to_rate = tl.zeros([MODES, BLOCK], tl.float32)
    to_weight = tl.zeros([MODES, BLOCK], tl.float32)
    to_skip = tl.zeros([BLOCK], tl.float32)
    to_beta = tl.zeros([BLOCK], tl.float32)
    if FREE and chunk == chunks - 1:
        _, _, last = load_state(LAST, b * 3 * N * C, C, N, c, n, there, FREE)
        end = tl.load(TOKEN_TOPS + (base + T - 1) * C + c, mask=c < C, other=0.0)
        to_beta += tl.sum(a2 * last, 0) * end / beta
    h, top = load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE), first
    stops = (h,)
    tops_there = (top,)
    for i in tl.static_range(CHUNK // STOP - 1):
        for t in range(chunk * CHUNK + i * STOP, chunk * CHUNK + i * STOP + STOP):
            _, h, top = stretch(
                rates, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, top, beta, base, t, T, C, N, c, n,
                v_step, marked, FREE, HAS_STEP, HAS_WRITE,
            )  # fmt: skip
        stops = stops + (h,)
        tops_there = tops_there + (top,)
    for back in range(CHUNK // STRETCH):
        begin = chunk * CHUNK + CHUNK - (back + 1) * STRETCH
        last_stop = (CHUNK // STRETCH - 1 - back) * STRETCH // STOP
        h, top = stops[0], tops_there[0]
        for i in tl.static_range(1, CHUNK // STOP):
            passed = last_stop >= i
            held = stops[i]
            h = (tl.where(passed, held[0], h[0]), tl.where(passed, held[1], h[1]), tl.where(passed, held[2], h[2]))
            top = tl.where(passed, tops_there[i], top)
        for t in range(chunk * CHUNK + last_stop * STOP, begin):
            _, h, top = stretch(
                rates, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, top, beta, base, t, T, C, N, c, n,
                v_step, marked, FREE, HAS_STEP, HAS_WRITE,
            )  # fmt: skip
        seen = ()
        tops = (top,)
        for i in tl.static_range(STRETCH):
            met, h, top = stretch(
                rates, h, V, STEP, WRITE, MARKS, TOKEN_TOPS, top, beta, base, begin + i, T, C, N, c, n,
                v_step, marked, FREE, HAS_STEP, HAS_WRITE,
            )  # fmt: skip
            seen = seen + (met,)
            tops = tops + (top,)
        for i in tl.static_range(STRETCH):
            t = begin + STRETCH - 1 - i
            row = base + t
            v, step, exponent, real, start = token(V, STEP, MARKS, b * T, t, T, c, C, v_step, beta, marked, HAS_STEP)
            write = amounts(WRITE, row, n, N, real, HAS_WRITE)
            top = tops[STRETCH - i]
            here = at(c < C, real)
            inside = at(c < C, (t < T).to(tl.int32))
            modes = at(n < N, (t < T).to(tl.int32))
            energy = tl.exp(exponent - top)
            d0, d1, d2, by_logarithm = slopes(
                MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, row * C + c, here, beta, top,
                by_total, FREE, BY_MEAN, BY_FREE,
            )  # fmt: skip
            if HAS_READ:
                read = amounts(READ, row, n, N, real, HAS_READ)
                query = tl.zeros([MODES, BLOCK], tl.float32) + read[:, None]
                if INCLUSIVE:
                    own = tl.zeros([BLOCK], tl.float32) + tl.sum(read * write, 0)
            elif INCLUSIVE:
                own = tl.sum(query * write[:, None], 0)
            z0, z1, z2, factor = seen[STRETCH - 1 - i]
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
                _store_part(D_READ, tl.sum(by_read, 1), b, t, batch, T, n, N, modes, ADDED)
            else:
                to_weight += by_state
                if INCLUSIVE:
                    to_weight += write[:, None] * along[None, :]
            if HAS_WRITE:
                _store_part(D_WRITE, tl.sum(by_write, 1) * real, b, t, batch, T, n, N, modes, ADDED)
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
            keep, fade = decays(slow, step, before, top, start)
            a0, a1, a2 = lessened(a0, a1, a2, factor, keep, fade, FREE)
    tl.store(D_RATE + place * N * C + n[:, None] * C + c[None, :], to_rate, mask=there)
    if not HAS_READ:
        tl.store(D_WEIGHT + place * N * C + n[:, None] * C + c[None, :], to_weight, mask=there)
    if SKIPS:
        tl.store(D_SKIP + place * C + c, to_skip, mask=c < C)
    if chunk == 0:
        _, _, z2 = load_state(SUMS, place * 3 * N * C, C, N, c, n, there, FREE)
        to_beta -= tl.sum(a2 * z2, 0) * first / beta
        store_state(D_FIRST, b * 3 * N * C, C, N, c, n, there, a0, a1, a2)
    if FREE:
        tl.store(D_BETA + place * C + c, to_beta, mask=c < C)
