"""Triton kernels of the read over pairs, in float32, parallel over batch, heads and chunks of time.

A program holds the modes h [N] of a head for the streams 1, v and exp(beta v - top), as `state_space.triton_kernels`
does for a channel; here the channels of a head are spread over its modes, and gathered from them:

    u_s[n] = sum_k spread[n, k] x_s[k],   x = 1, v, exp(beta v - top)
    h_t = exp(gate_t) h_{t-1} + write_t u,   y_s[j] = sum_n gather[j, n] read_t[n] h_s[n]

Layouts: gate [B, T, H, N]; write, read [B, T, N]; spread [H, N, D]; gather [H, D, N]; v, mean, free, log_total
[B, T, H, D]; marks [B, T]; states [B, 3, H, N] and tops [B, H], those of chunks with a further axis after B. `top` is
held once per mode. Of a chunk, SLOWS [B, chunks, H] has the slowest gates of its tokens together, 1 if a segment starts
in it, and LAGS [B, chunks, H, N] what the gates of each mode are beyond those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.state_space.triton_backward import slopes
from femixer.kernels.state_space.triton_kernels import NOTHING, PADDING, START, TINY, at, decays, risen

# Given as numbers: nothing is compiled anew for other sizes, with marks or without, or for what an encoder asks.
SIZES = ["T", "H", "D", "chunks", "batch", "marked", "by_total"]


@triton.jit
def _token(V, GATE, WRITE, MARKS, b, t, T, h, H, N, D, n, d, beta, marked):
    """values [D], gates, writes [N], exponents; whether it is real (1 or 0, beyond the end 0) or starts a segment."""
    row = b * T + t
    real = (t < T).to(tl.int32)
    mark = tl.load(MARKS + tl.minimum(row, b * T + T - 1) * marked).to(tl.int32) * marked
    real = real * (1 - (mark & PADDING))
    start = at(n >= 0, real * (mark & START))
    modes = at(n < N, real)
    v = tl.load(V + (row * H + h) * D + d, mask=at(d < D, real), other=0.0).to(tl.float32)
    gate = tl.load(GATE + (row * H + h) * N + n, mask=modes, other=0.0).to(tl.float32)
    write = tl.load(WRITE + row * N + n, mask=modes, other=0.0).to(tl.float32)
    exponent = tl.where(at(d < D, real), beta * v, NOTHING)
    return v, gate, write, exponent, real, start


@triton.jit
def _gates(gate, n, N):
    """The slowest gate, once per mode, and the others relative to it."""
    slow = tl.max(tl.where(n < N, gate, float("-inf")), 0) + tl.zeros_like(gate)
    return slow, tl.where(n < N, gate - slow, 0.0)


@triton.jit
def _load_state(SUMS, place, N, HN, n, FREE: tl.constexpr):
    h0 = tl.load(SUMS + place + n, mask=n < N, other=0.0).to(tl.float32)
    h1 = tl.load(SUMS + place + HN + n, mask=n < N, other=0.0).to(tl.float32)
    h2 = tl.zeros_like(h0)
    if FREE:
        h2 = tl.load(SUMS + place + 2 * HN + n, mask=n < N, other=0.0).to(tl.float32)
    return h0, h1, h2


@triton.jit
def _store_state(SUMS, place, N, HN, n, h0, h1, h2):
    tl.store(SUMS + place + n, h0, mask=n < N)
    tl.store(SUMS + place + HN + n, h1, mask=n < N)
    tl.store(SUMS + place + 2 * HN + n, h2, mask=n < N)


@triton.jit
def _top(TOPS, place, n):
    return tl.maximum(tl.load(TOPS + place).to(tl.float32), NOTHING) + tl.zeros_like(n.to(tl.float32))


@triton.jit
def _beta(BETA, h, FREE: tl.constexpr):
    beta = 1.0
    if FREE:
        beta = tl.load(BETA + h).to(tl.float32)
    return beta


@triton.jit
def _decayed(h0, h1, h2, lag, keep, fade):
    factor = tl.exp(lag)
    return h0 * factor * keep, h1 * factor * keep, h2 * factor * fade


@triton.jit
def _energies(exponent, top, FREE: tl.constexpr):
    """exp(beta v - top) [D], zero where no free energy is asked for; top is the same for all modes."""
    energy = tl.zeros_like(exponent)
    if FREE:
        energy = tl.exp(exponent - tl.max(top, 0))
    return energy


@triton.jit
def _streams(spread, v, energy):
    return tl.sum(spread, 1), tl.sum(spread * v[None, :], 1), tl.sum(spread * energy[None, :], 1)


@triton.jit
def _matrix(MATRIX, h, n, d, N, D, BY_MODES: tl.constexpr):
    """spread [N, D] of a head, or its gather, transposed to that."""
    there = (n < N)[:, None] & (d < D)[None, :]
    if BY_MODES:
        place = h * N * D + n[:, None] * D + d[None, :]
    else:
        place = h * N * D + d[None, :] * N + n[:, None]
    return tl.load(MATRIX + place, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def summarize(
    GATE, WRITE, SPREAD, V, BETA, MARKS, SUMS, TOPS, SLOWS, LAGS, T, H, N, D, chunks, marked,
    MODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """The state that a chunk leaves when it begins with nothing, its top, and its gates together."""
    place, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    n, d = tl.arange(0, MODES), tl.arange(0, WIDTH)
    beta = _beta(BETA, h, FREE)
    spread = _matrix(SPREAD, h, n, d, N, D, True)
    h0 = tl.zeros([MODES], tl.float32)
    h1 = tl.zeros([MODES], tl.float32)
    h2 = tl.zeros([MODES], tl.float32)
    top = tl.full([MODES], NOTHING, tl.float32)
    slows = tl.zeros([MODES], tl.float32)
    lags = tl.zeros([MODES], tl.float32)
    reset = n < 0
    for t in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
        v, gate, write, exponent, real, start = _token(
            V, GATE, WRITE, MARKS, b, t, T, h, H, N, D, n, d, beta, marked
        )  # fmt: skip
        slow, lag = _gates(gate, n, N)
        top, before = risen(top, slow, 1.0, tl.max(exponent, 0), start)
        keep, fade = decays(slow, 1.0, before, top, start)
        h0, h1, h2 = _decayed(h0, h1, h2, lag, keep, fade)
        u0, u1, u2 = _streams(spread, v, _energies(exponent, top, FREE))
        h0, h1, h2 = h0 + write * u0, h1 + write * u1, h2 + write * u2
        slows += slow
        lags += lag
        reset = reset | start
    _store_state(SUMS, (place * 3 * H + h) * N, N, H * N, n, h0, h1, h2)
    tl.store(TOPS + place * H + h, tl.max(top, 0))
    slows = tl.where(reset, 1.0, slows)
    tl.store(SLOWS + place * H + h, tl.max(slows, 0))
    tl.store(LAGS + (place * H + h) * N + n, lags, mask=n < N)


@triton.jit
def _chunk_gates(SLOWS, LAGS, place, N, n):
    """Over a chunk: whether a segment starts, the slowest gates and what the modes' are beyond those."""
    slow = tl.load(SLOWS + place) + tl.zeros_like(n.to(tl.float32))
    return slow > 0, tl.minimum(slow, 0.0), tl.load(LAGS + place * N + n, mask=n < N, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def carry(
    SUMS, TOPS, SLOWS, LAGS, FIRST, FIRST_TOP, H, N, chunks, MODES: tl.constexpr, FREE: tl.constexpr
):  # fmt: skip
    """From the states that chunks leave alone to those before each of them, in their places."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, MODES)
    h0, h1, h2 = _load_state(FIRST, (b * 3 * H + h) * N, N, H * N, n, FREE)
    top = _top(FIRST_TOP, b * H + h, n)
    for chunk in range(chunks):
        place = b * chunks + chunk
        own0, own1, own2 = _load_state(SUMS, (place * 3 * H + h) * N, N, H * N, n, FREE)
        local = _top(TOPS, place * H + h, n)
        tl.debug_barrier()  # whoever holds a copy has read it before it is written
        _store_state(SUMS, (place * 3 * H + h) * N, N, H * N, n, h0, h1, h2)
        tl.store(TOPS + place * H + h, tl.max(top, 0))
        start, slow, lag = _chunk_gates(SLOWS, LAGS, place * H + h, N, n)
        top, before = risen(top, slow, 1.0, local, start)
        keep, fade = decays(slow, 1.0, before, top, start)
        h0, h1, h2 = _decayed(h0, h1, h2, lag, keep, fade)
        h0, h1, h2 = h0 + own0, h1 + own1, h2 + own2 * tl.exp(local - top)


@triton.jit(do_not_specialize=SIZES)
def read_chunks(
    GATE, WRITE, READ, SPREAD, GATHER, V, BETA, MARKS, SUMS, TOPS, MEAN, FREE_ENERGY, LOG_TOTAL, LAST, LAST_TOP,
    T, H, N, D, chunks, marked,
    MODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    FREE: tl.constexpr, INCLUSIVE: tl.constexpr,
):  # fmt: skip
    """The results of a chunk's tokens, from the state before it; the last chunk also leaves the state after it."""
    place, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    n, d = tl.arange(0, MODES), tl.arange(0, WIDTH)
    beta = _beta(BETA, h, FREE)
    spread, gather = _matrix(SPREAD, h, n, d, N, D, True), _matrix(GATHER, h, n, d, N, D, False)
    h0, h1, h2 = _load_state(SUMS, (place * 3 * H + h) * N, N, H * N, n, FREE)
    top = _top(TOPS, place * H + h, n)
    for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
        v, gate, write, exponent, real, start = _token(
            V, GATE, WRITE, MARKS, b, t, T, h, H, N, D, n, d, beta, marked
        )  # fmt: skip
        read = tl.load(READ + (b * T + t) * N + n, mask=at(n < N, real), other=0.0).to(tl.float32)
        slow, lag = _gates(gate, n, N)
        top, before = risen(top, slow, 1.0, tl.max(exponent, 0), start)
        keep, fade = decays(slow, 1.0, before, top, start)
        z0, z1, z2 = _decayed(h0, h1, h2, lag, keep, fade)
        u0, u1, u2 = _streams(spread, v, _energies(exponent, top, FREE))
        h0, h1, h2 = z0 + write * u0, z1 + write * u1, z2 + write * u2
        if INCLUSIVE:
            z0, z1, z2 = h0, h1, h2
        y0 = tl.sum(gather * (read * z0)[:, None], 0)
        y1 = tl.sum(gather * (read * z1)[:, None], 0)
        nothing = y0 <= TINY  # written as <= so that NaN propagates
        total = tl.where(nothing, 1.0, y0)
        mean = tl.where(nothing, 0.0, y1 / total)
        log_total = tl.where(nothing, float("-inf"), tl.log(total))
        here = ((b * T + t) * H + h) * D + d
        shown = at(d < D, real)
        if FREE:
            y2 = tl.sum(gather * (read * z2)[:, None], 0)
            unseen = nothing | (y2 <= TINY)
            free = (tl.max(top, 0) + tl.log(tl.where(unseen, 1.0, y2) / total)) / beta
            free = tl.where(unseen | (free < mean), mean, free)
            tl.store(FREE_ENERGY + here, tl.where(shown, free, 0.0), mask=d < D)
        tl.store(MEAN + here, tl.where(shown, mean, 0.0), mask=d < D)
        tl.store(LOG_TOTAL + here, tl.where(shown, log_total, 0.0), mask=d < D)
    if chunk == chunks - 1:
        _store_state(LAST, (b * 3 * H + h) * N, N, H * N, n, h0, h1, h2)
        highest = tl.max(top, 0)
        tl.store(LAST_TOP + b * H + h, tl.where(highest <= NOTHING, float("-inf"), highest))


@triton.jit
def _queries(gather, d0, d1, d2):
    """What the sums' gradients [D] are for the modes [N], but for the token's own weights."""
    return tl.sum(gather * d0[None, :], 1), tl.sum(gather * d1[None, :], 1), tl.sum(gather * d2[None, :], 1)


@triton.jit
def _tops(TOKEN_TOPS, first, b, t, T, h, H, n, N, back, start, CHUNK: tl.constexpr):
    """The top of the token `back` from its chunk's end, and the one before it, which a start forgets; once per mode."""
    place = TOKEN_TOPS + (b * T + t) * H + h + tl.zeros_like(n).to(tl.int64)
    inside = at(n < N, (t < T).to(tl.int32))
    within = at(inside, tl.zeros([], tl.int32) + CHUNK - 1 - back)
    top = tl.load(place, mask=inside, other=NOTHING)
    earlier = tl.load(place - H, mask=within, other=NOTHING)
    before = tl.where(start, NOTHING, tl.where(within, earlier, first))
    return tl.where(inside, top, before), before


@triton.jit(do_not_specialize=SIZES)
def adjoints(
    GATE, WRITE, READ, SPREAD, GATHER, V, BETA, MARKS, SUMS, TOPS, TOKEN_TOPS, SEEN,
    MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, BACK, T, H, N, D, chunks, marked, by_total,
    MODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr,
    BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """The tops of a chunk's tokens [B, T, H], the decayed states that they meet, SEEN [B, T, 3, H, N], and the gradient
    of the state before the chunk by what the chunk reads of it."""
    place, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    n, d = tl.arange(0, MODES), tl.arange(0, WIDTH)
    beta = _beta(BETA, h, FREE)
    spread, gather = _matrix(SPREAD, h, n, d, N, D, True), _matrix(GATHER, h, n, d, N, D, False)
    h0, h1, h2 = _load_state(SUMS, (place * 3 * H + h) * N, N, H * N, n, FREE)
    first = _top(TOPS, place * H + h, n)
    top = first
    for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
        v, gate, write, exponent, real, start = _token(V, GATE, WRITE, MARKS, b, t, T, h, H, N, D, n, d, beta, marked)
        slow, lag = _gates(gate, n, N)
        top, before = risen(top, slow, 1.0, tl.max(exponent, 0), start)
        tl.store(TOKEN_TOPS + (b * T + t) * H + h, tl.max(top, 0))
        keep, fade = decays(slow, 1.0, before, top, start)
        z0, z1, z2 = _decayed(h0, h1, h2, lag, keep, fade)
        _store_state(SEEN, ((b * T + t) * 3 * H + h) * N, N, H * N, n, z0, z1, z2)
        u0, u1, u2 = _streams(spread, v, _energies(exponent, top, FREE))
        h0, h1, h2 = z0 + write * u0, z1 + write * u1, z2 + write * u2
    tl.debug_barrier()
    a0 = tl.zeros([MODES], tl.float32)
    a1 = tl.zeros([MODES], tl.float32)
    a2 = tl.zeros([MODES], tl.float32)
    for back in range(CHUNK):
        t = chunk * CHUNK + CHUNK - 1 - back
        row = b * T + t
        v, gate, write, exponent, real, start = _token(V, GATE, WRITE, MARKS, b, t, T, h, H, N, D, n, d, beta, marked)
        read = tl.load(READ + row * N + n, mask=at(n < N, real), other=0.0).to(tl.float32)
        top, before = _tops(TOKEN_TOPS, first, b, t, T, h, H, n, N, back, start, CHUNK)
        highest = tl.max(tl.where(n < N, top, NOTHING), 0)
        d0, d1, d2, _ = slopes(
            MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, (row * H + h) * D + d, at(d < D, real), beta,
            highest, by_total, FREE, BY_MEAN, BY_FREE,
        )  # fmt: skip
        r0, r1, r2 = _queries(gather, d0, d1, d2)
        a0, a1, a2 = a0 + read * r0, a1 + read * r1, a2 + read * r2
        slow, lag = _gates(gate, n, N)
        keep, fade = decays(slow, 1.0, before, top, start)
        a0, a1, a2 = _decayed(a0, a1, a2, lag, keep, fade)
    _store_state(BACK, (place * 3 * H + h) * N, N, H * N, n, a0, a1, a2)


@triton.jit(do_not_specialize=SIZES)
def carry_back(
    BACK, TOPS, SLOWS, LAGS, LAST_TOP, G_LAST, H, N, chunks,
    MODES: tl.constexpr, FREE: tl.constexpr, BY_LAST: tl.constexpr,
):  # fmt: skip
    """From each chunk's own part of the gradient of the state before it to the gradient of the state after it, by all
    that follows, in their places."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, MODES)
    a0 = tl.zeros([MODES], tl.float32)
    a1 = tl.zeros([MODES], tl.float32)
    a2 = tl.zeros([MODES], tl.float32)
    if BY_LAST:
        a0, a1, a2 = _load_state(G_LAST, (b * 3 * H + h) * N, N, H * N, n, FREE)
    later = _top(LAST_TOP, b * H + h, n)
    for back in range(chunks):
        place = b * chunks + chunks - 1 - back
        own0, own1, own2 = _load_state(BACK, (place * 3 * H + h) * N, N, H * N, n, FREE)
        tl.debug_barrier()
        _store_state(BACK, (place * 3 * H + h) * N, N, H * N, n, a0, a1, a2)
        top = _top(TOPS, place * H + h, n)
        start, slow, lag = _chunk_gates(SLOWS, LAGS, place * H + h, N, n)
        keep, fade = decays(slow, 1.0, tl.where(start, NOTHING, top), later, start)
        a0, a1, a2 = _decayed(a0, a1, a2, lag, keep, fade)
        a0, a1, a2 = a0 + own0, a1 + own1, a2 + own2
        later = top


@triton.jit
def _stream(x, d, z, a, read, write, spread, gather, to_spread, to_gather, by, INCLUSIVE: tl.constexpr):
    """Gradients by one stream x [D] of a token, by that of its sums d [D], the state that it meets z [N] and the
    gradient a [N] of the one after it: a of what the token reads too, of x, and in sums those of the matrices, and
    `by` those of reads, writes and gates. One stream at a time, because there are no registers for three."""
    u, r, g = tl.sum(spread * x[None, :], 1), tl.sum(gather * d[None, :], 1), z
    if INCLUSIVE:
        g, a = z + write * u, a + read * r
    w = write * a
    to_gather += (read * g)[:, None] * d[None, :]
    to_spread += w[:, None] * x[None, :]
    to_x, by_write = tl.sum(spread * w[:, None], 0), by[1] + a * u
    if not INCLUSIVE:
        a = a + read * r
    return a, to_x, to_spread, to_gather, (by[0] + r * g, by_write, by[2] + a * z)


@triton.jit(do_not_specialize=SIZES)
def gradients(
    GATE, WRITE, READ, SPREAD, GATHER, V, BETA, MARKS, SUMS, TOPS, TOKEN_TOPS, SEEN, BACK,
    MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, LAST,
    D_GATE, D_WRITE, D_READ, D_SPREAD, D_GATHER, D_V, D_BETA, D_FIRST, T, H, N, D, chunks, batch,
    marked, by_total, MODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FREE: tl.constexpr,
    INCLUSIVE: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Of a chunk, from the states that its tokens meet and the gradient of the state after it. SPREAD is [H, D, N]
    here. In parts: D_WRITE and D_READ [H, B, T, N]; D_SPREAD [B, chunks, H, N, D], D_GATHER
    [B, chunks, H, D, N]; D_BETA [B, chunks, H]."""
    place, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk, b = (place % chunks).to(tl.int32), place // chunks
    n, d = tl.arange(0, MODES), tl.arange(0, WIDTH)
    beta = _beta(BETA, h, FREE)
    spread, gather = _matrix(SPREAD, h, n, d, N, D, False), _matrix(GATHER, h, n, d, N, D, False)
    first = _top(TOPS, place * H + h, n)
    a0, a1, a2 = _load_state(BACK, (place * 3 * H + h) * N, N, H * N, n, FREE)
    to_spread, to_gather = 0.0 * spread, 0.0 * gather  # held as these are
    to_beta = tl.zeros([MODES], tl.float32)
    by_values = tl.zeros([WIDTH], tl.float32)
    if FREE and chunk == chunks - 1:
        _, _, last = _load_state(LAST, (b * 3 * H + h) * N, N, H * N, n, FREE)
        to_beta += a2 * last * tl.load(TOKEN_TOPS + (b * T + T - 1) * H + h) / beta
    for back in range(CHUNK):
        t = chunk * CHUNK + CHUNK - 1 - back
        row = b * T + t
        v, gate, write, exponent, real, start = _token(V, GATE, WRITE, MARKS, b, t, T, h, H, N, D, n, d, beta, marked)
        inside = (t < T).to(tl.int32)
        modes, here = at(n < N, inside), at(d < D, real)
        read = tl.load(READ + row * N + n, mask=at(n < N, real), other=0.0).to(tl.float32)
        top, before = _tops(TOKEN_TOPS, first, b, t, T, h, H, n, N, back, start, CHUNK)
        highest = tl.max(tl.where(n < N, top, NOTHING), 0)
        energy = _energies(exponent, highest + tl.zeros([MODES], tl.float32), FREE)
        d0, d1, d2, by_logarithm = slopes(
            MEAN, FREE_ENERGY, LOG_TOTAL, G_MEAN, G_FREE, G_TOTAL, (row * H + h) * D + d, here, beta, highest,
            by_total, FREE, BY_MEAN, BY_FREE,
        )  # fmt: skip
        z0, z1, z2 = _load_state(SEEN, (tl.minimum(row, b * T + T - 1) * 3 * H + h) * N, N, H * N, n, FREE)
        one = tl.where(here, 1.0, 0.0)
        by = tl.zeros([MODES], tl.float32), tl.zeros([MODES], tl.float32), tl.zeros([MODES], tl.float32)
        a0, x0, to_spread, to_gather, by = _stream(
            one, d0, z0, a0, read, write, spread, gather, to_spread, to_gather, by, INCLUSIVE
        )
        a1, x1, to_spread, to_gather, by = _stream(
            v, d1, z1, a1, read, write, spread, gather, to_spread, to_gather, by, INCLUSIVE
        )
        a2, x2, to_spread, to_gather, by = _stream(
            energy, d2, z2, a2, read, write, spread, gather, to_spread, to_gather, by, INCLUSIVE
        )
        part = ((h * batch + b) * T + t) * N + n
        tl.store(D_READ + part, by[0] * real, mask=modes)
        tl.store(D_WRITE + part, by[1] * real, mask=modes)
        tl.store(D_GATE + (row * H + h) * N + n, by[2] * real, mask=modes)
        x2 *= energy
        tl.store(D_V + (row * H + h) * D + d, tl.where(here, x1 + beta * x2, 0.0), mask=at(d < D, inside))
        # Exponents count from the token's top, so that large ones do not cancel; z2 went from one top to the next.
        by_values += by_logarithm + x2 * tl.where(here, exponent - highest, 0.0) / beta
        to_beta += a2 * z2 * (before - top) / beta * inside
        slow, lag = _gates(gate, n, N)
        keep, fade = decays(slow, 1.0, before, top, start)
        a0, a1, a2 = _decayed(a0, a1, a2, lag, keep, fade)
    matrix = (place * H + h) * N * D
    there = (n < N)[:, None] & (d < D)[None, :]
    tl.store(D_SPREAD + matrix + n[:, None] * D + d[None, :], to_spread, mask=there)
    tl.store(D_GATHER + matrix + d[None, :] * N + n[:, None], to_gather, mask=there)
    if chunk == 0:
        _, _, z2 = _load_state(SUMS, (place * 3 * H + h) * N, N, H * N, n, FREE)
        to_beta -= a2 * z2 * first / beta
        _store_state(D_FIRST, (b * 3 * H + h) * N, N, H * N, n, a0, a1, a2)
    if FREE:
        tl.store(D_BETA + place * H + h, tl.sum(to_beta, 0) + tl.sum(by_values, 0))
