"""Triton kernels of the decayed linear read: what every chunk adds to the state (`sum_chunks`), the states before the
chunks (`carry`), what the tokens of a chunk read (`read`), and all of it for one token (`step`).

States lie in memory per chunk, [B, G, N + 1, ...] in float32: log weight LN [E], mean AVG [E, D] and log mean
exponential LME [E, D] of every row. Place c + 1 has first what chunk c adds, then the state after it.

Where sums are doubtful (triton_chunks.FAINT) tokens are read again one by one, in logarithms, exact at any range:
`read` leaves a mark for `read_again`, whose programs end at once where there is none. The host waits for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.decayed_linear.triton_chunks import (
    BARELY,
    FAINT,
    KEYS,
    NARROW,
    NOTHING,
    NUMBERS,
    STRONGEST,
    add_logs,
    chunk_gates,
    chunk_marks,
    chunk_scores,
    column_of,
    exponentials,
    load_rows,
    log_of,
    log_ratio,
    mix,
    row_of,
    slice_gates,
    state_levels,
    store_rows,
    visibility,
)
from femixer.kernels.triton_math import expm1, log1p


@triton.jit(do_not_specialize=NUMBERS)
def sum_chunks(
    K, GATE, V, BETA, MARKS, LNC, DECAY, AVG, LME, length, chunks, G, gated, marked,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    W: tl.constexpr, ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What chunk c adds to the state, at its end: the sums over the tokens since the last start of a segment."""
    c, bg = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, g = bg // G, bg % G
    t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
    last = tl.max(segment, 0)
    reach, rest, whole, remainder = chunk_gates(
        GATE + b * g_b + g * g_h, c * C, g_t, real, gated, W if W == 1 else E, C, W
    )
    live = real & (segment == last)
    k = load_rows(K + b * k_b + g * k_h, c * C, k_t, live, E, BE)
    # Keys at the chunk's end, in every row relative to the one that is decayed least.
    decay = ((whole[None, :] - reach) + (remainder[None, :] - rest)) + tl.zeros([C, BE], tl.float32)
    slowest = tl.max(tl.where(k > 0, decay, NOTHING), 0)
    there = slowest > BARELY
    slowest = tl.where(there, slowest, 0.0)
    keys = k * tl.exp(tl.minimum(decay - slowest[None, :], 0.0))
    total = tl.sum(keys, 0)
    row = tl.arange(0, BE)
    place = bg * chunks + c
    tl.store(LNC + place * E + row, tl.where(there, log_of(total) + slowest, NOTHING), mask=row < E)
    kept = tl.where(last > 0, NOTHING, whole + remainder) + tl.zeros([BE], tl.float32)
    tl.store(DECAY + place * E + row, kept, mask=row < E)
    share = tl.trans(keys / tl.where(there, total, 1.0)[None, :])
    after = (bg * (chunks + 1) + c + 1) * E * D
    for first in range(0, D, BD):
        v = load_rows(V + b * v_b + g * v_h, c * C, v_t, live, D, BD, first)
        store_rows(AVG + after, 0, D, row < E, tl.dot(share, v, input_precision=PRECISION), D, BD, first)
        if ENERGETIC:
            column = first + tl.arange(0, BD)
            z = v * tl.load(BETA + g * D + column, mask=column < D, other=0).to(tl.float32)[None, :]
            x, top, base = exponentials(z, live)
            energy, faint = log_ratio(tl.dot(share, x, input_precision=PRECISION), base)
            energy += top[None, :]
            if tl.max((faint & there[:, None]).to(tl.int32)) > 0:
                level = log_of(k) + (decay - slowest[None, :]) - log_of(total)[None, :]
                energy = _sum_exactly(level, z, C, BE, BD)
            store_rows(LME + after, 0, D, row < E, tl.where(there[:, None], energy, 0.0), D, BD, first)


@triton.jit
def _sum_exactly(level, z, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr):
    """log sum_i exp(level_i[m] + z_i) [BE, BD], token by token."""
    energy = tl.full([BE, BD], NOTHING, tl.float32)
    for i in range(C):
        weight = row_of(level, i)
        term = tl.where((weight > BARELY)[:, None], weight[:, None] + row_of(z, i)[None, :], NOTHING)
        energy = add_logs(energy, term)
    return energy


@triton.jit(do_not_specialize=["chunks"])
def carry(
    LNC, DECAY, LN, AVG, LME, FIRST, TOP, LAST, LAST_TOP, chunks, E: tl.constexpr, D: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, STATE: tl.constexpr, ENERGETIC: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The states before every chunk and after the last, for all rows of BD value channels."""
    bg, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    inside = (row < E)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    weight = tl.full([BE], NOTHING, tl.float32)
    average, energy = tl.zeros([BE, BD], tl.float32), tl.zeros([BE, BD], tl.float32)
    if STATE:
        weight, average, energy = load_state(FIRST, TOP, bg, first, E, D, BE, BD, ENERGETIC)
    for c in range(chunks + 1):
        here = bg * (chunks + 1) + c
        tl.store(LN + here * E + row, weight, mask=row < tl.where(first == 0, E, 0))
        tl.store(AVG + here * E * D + at, average, mask=inside)
        if ENERGETIC:
            tl.store(LME + here * E * D + at, energy, mask=inside)
        if c < chunks:
            place = (bg * chunks + c) * E + row
            kept = weight + tl.load(DECAY + place, mask=row < E, other=0)
            kept = tl.where(kept > BARELY, kept, NOTHING)
            added = tl.load(LNC + place, mask=row < E, other=NOTHING)
            weight = tl.where(tl.maximum(kept, added) > BARELY, add_logs(kept, added), NOTHING)
            old = tl.where(kept > BARELY, kept - weight, NOTHING)
            new = tl.where(added > BARELY, added - weight, NOTHING)
            after = (here + 1) * E * D + at
            average = tl.exp(old)[:, None] * average
            average += tl.exp(new)[:, None] * tl.load(AVG + after, mask=inside, other=0)
            if ENERGETIC:
                more = tl.load(LME + after, mask=inside, other=0)
                energy = tl.where((weight > BARELY)[:, None], mix(energy, old[:, None], more, new[:, None]), 0.0)
    if KEEP:
        store_state(LAST, LAST_TOP, bg, first, weight, average, energy, E, D, BE, BD, ENERGETIC)


@triton.jit
def load_state(
    FIRST, TOP, bg, first, E: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    ENERGETIC: tl.constexpr,
):  # fmt: skip
    """Sums [E, D + 1 or 2 D + 1] and top [D] as log weights [BE], means and log mean exponentials [BE, BD]."""
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    inside = (row < E)[:, None] & (column < D)[None, :]
    COLUMNS: tl.constexpr = 2 * D + 1 if ENERGETIC else D + 1
    FIRST += bg * E * COLUMNS
    total = tl.load(FIRST + row * COLUMNS + D, mask=row < E, other=0).to(tl.float32)
    weight = log_of(total)
    sums = tl.load(FIRST + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0).to(tl.float32)
    average = sums / tl.where(total > 0, total, 1.0)[:, None]
    energy = tl.zeros([BE, BD], tl.float32)
    if ENERGETIC:
        top = tl.maximum(tl.load(TOP + bg * D + column, mask=column < D, other=0).to(tl.float32), NOTHING)
        energy = log_of(
            tl.load(FIRST + row[:, None] * COLUMNS + D + 1 + column[None, :], mask=inside, other=0).to(tl.float32)
        )
        energy = tl.where(energy > BARELY, energy + top[None, :] - weight[:, None], NOTHING)
        energy = tl.where((total > 0)[:, None], energy, 0.0)
    return weight, average, energy


@triton.jit
def store_state(
    LAST, LAST_TOP, bg, first, weight, average, energy, E: tl.constexpr, D: tl.constexpr, BE: tl.constexpr,
    BD: tl.constexpr, ENERGETIC: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_state`."""
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    inside = (row < E)[:, None] & (column < D)[None, :]
    COLUMNS: tl.constexpr = 2 * D + 1 if ENERGETIC else D + 1
    LAST += bg * E * COLUMNS
    total = tl.exp(weight)
    tl.store(LAST + row * COLUMNS + D, total, mask=row < tl.where(first == 0, E, 0))
    tl.store(LAST + row[:, None] * COLUMNS + column[None, :], total[:, None] * average, mask=inside)
    top = tl.full([BD], NOTHING, tl.float32)
    if ENERGETIC:
        level = tl.where((weight > BARELY)[:, None], energy + weight[:, None], NOTHING)
        top = tl.max(level, 0)
        e = tl.where(level > BARELY, tl.exp(tl.minimum(level - top[None, :], 0.0)), 0.0)
        tl.store(LAST + row[:, None] * COLUMNS + D + 1 + column[None, :], e, mask=inside)
    top = tl.where(top > BARELY, top, -float("inf"))
    tl.store(LAST_TOP + bg * D + column, top, mask=column < D)


@triton.jit(do_not_specialize=NUMBERS)
def read(
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, AGAIN, length, chunks, H, G, gated, marked,
    exclusive, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, E: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean, free energy and log total of a chunk's tokens, from tokens up to them and the state before the chunk."""
    c, bh = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // (H // G)
    t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
    GATE += b * g_b + g * g_h
    Q += b * q_b + h * q_h
    reach, rest, whole, remainder = chunk_gates(GATE, c * C, g_t, real, gated if W == 1 else 0, 1, C, 1)
    seen = visibility(real, segment, exclusive, C)
    scores = chunk_scores(
        Q, K + b * k_b + g * k_h, GATE, c * C, q_t, k_t, g_t, real, reach, rest, seen, E, C, W, PRECISION
    )
    total = tl.sum(scores, 1)
    weight = log_of(total)
    p = scores / tl.where(total > 0, total, 1.0)[:, None]
    place = (b * G + g) * (chunks + 1) + c
    heard = real & (segment == 0)
    strongest, far = tl.min(whole), tl.full([C], NOTHING, tl.float32)
    if STATE or W > 1:
        for e in range(0, E, KEYS):
            coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
            strongest = tl.minimum(strongest, lowest)
            if STATE:
                far = tl.maximum(far, tl.max(state_levels(LN + place * E, coarse, fine, e, E), 1))
    # Weights that strong decays leave nothing of, but that may be all there is.
    faint = (tl.max(seen.to(tl.int32), 1) > 0) & (tl.where(strongest < -20, total, 1.0) < FAINT)
    before, sums = tl.full([C], NOTHING, tl.float32), tl.zeros([C], tl.float32)
    if STATE:
        heard = heard & (far > BARELY)
        for e in range(0, E, KEYS):
            coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
            level = state_levels(LN + place * E, coarse, fine, e, E)
            sums += tl.sum(_past(Q, c * C, q_t, heard, level, far, e, E), 1)
        faint = faint | (heard & (sums < FAINT))
        before = tl.where(sums > 0, log_of(sums) + far, NOTHING)
        sums = tl.where(sums > 0, 1 / tl.where(sums > 0, sums, 1.0), 0.0)
    all_weight = tl.where(tl.maximum(weight, before) > BARELY, add_logs(weight, before), NOTHING)
    own = tl.where(weight > BARELY, weight - all_weight, NOTHING)
    old = tl.where(before > BARELY, before - all_weight, NOTHING)
    doubts = tl.max(faint.to(tl.int32))
    for first in range(0, D, BD):
        column = first + tl.arange(0, BD)
        v = load_rows(V + b * v_b + g * v_h, c * C, v_t, real, D, BD, first)
        mean = tl.exp(own)[:, None] * tl.dot(p, v, input_precision=PRECISION)
        energy = tl.zeros([C, BD], tl.float32)
        beta = tl.full([BD], 1.0, tl.float32)
        if ENERGETIC:
            beta = tl.load(BETA + g * D + column, mask=column < D, other=1).to(tl.float32)
            x, top, base = exponentials(v * beta[None, :], real)
            energy, unclear = log_ratio(tl.dot(p, x, input_precision=PRECISION), base)
            energy += top[None, :]
            doubts += tl.max((unclear & (weight > BARELY)[:, None]).to(tl.int32))
        if STATE:
            old_top, base = _state_range(LN + place * E, LME + place * E * D, first, E, D, BD, ENERGETIC)
            old_mean, old_energy = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
            for e in range(0, E, KEYS):
                coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
                level = state_levels(LN + place * E, coarse, fine, e, E)
                past = _past(Q, c * C, q_t, heard, level, far, e, E) * sums[:, None]
                row = e + tl.arange(0, KEYS)
                average = load_rows(AVG + place * E * D, e, D, row < E, D, BD, first)
                old_mean = tl.dot(past, average, old_mean, input_precision=PRECISION)
                if ENERGETIC:
                    lme = load_rows(LME + place * E * D, e, D, row < E, D, BD, first) - old_top[None, :]
                    ln = tl.load(LN + place * E + row, mask=row < E, other=NOTHING)
                    lme = tl.where((ln > BARELY)[:, None], lme, 0.0)
                    powers = tl.where(base[None, :], expm1(lme), tl.exp(lme))
                    old_energy = tl.dot(past, powers, old_energy, input_precision=PRECISION)
            mean += tl.exp(old)[:, None] * old_mean
            if ENERGETIC:
                more, unclear = log_ratio(old_energy, base)
                doubts += tl.max((unclear & (before > BARELY)[:, None]).to(tl.int32))
                energy = mix(energy, own[:, None], more + old_top[None, :], old[:, None])
        _store(MEAN, FREE, b, h, c * C, length, all_weight, mean, energy, beta, first, H, D, BD, ENERGETIC)
    _store_total(LOG, b, h, t, length, all_weight, H)
    tl.store(AGAIN + tl.program_id(0), doubts)


@triton.jit
def _past(Q, start, step, heard, level, far, first, E: tl.constexpr):
    """Weights [C, KEYS] of rows of the state, relative to exp(far)."""
    q = load_rows(Q, start, step, heard, E, KEYS, first)
    return tl.where(heard[:, None], q * tl.exp(tl.minimum(level - far[:, None], 0.0)), 0.0)


@triton.jit
def _state_range(LN, LME, first, E: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ENERGETIC: tl.constexpr):
    """The largest log mean exponential of the state's rows [BD], and whether they are close together."""
    top, bottom = tl.full([BD], NOTHING, tl.float32), tl.full([BD], -NOTHING, tl.float32)
    if ENERGETIC:
        for e in range(0, E, KEYS):
            row = e + tl.arange(0, KEYS)
            there = (tl.load(LN + row, mask=row < E, other=NOTHING) > BARELY)[:, None]
            lme = load_rows(LME, e, D, row < E, D, BD, first)
            top = tl.maximum(top, tl.max(tl.where(there, lme, NOTHING), 0))
            bottom = tl.minimum(bottom, tl.min(tl.where(there, lme, -NOTHING), 0))
    return tl.where(top > BARELY, top, 0.0), top - bottom < NARROW


@triton.jit
def _store(
    MEAN, FREE, b, h, start, length, weight, mean, energy, beta, first, H, D: tl.constexpr,
    BD: tl.constexpr, ENERGETIC: tl.constexpr,
):  # fmt: skip
    """The free energy is the mean where rounding puts it below."""
    there, inside = (weight > BARELY)[:, None], start + tl.arange(0, weight.shape[0]) < length
    mean = tl.where(there, mean, 0.0)
    store_rows(MEAN + (b * length * H + h) * D, start, H * D, inside, mean, D, BD, first)
    if ENERGETIC:
        free = tl.where(there, energy / beta[None, :], 0.0)
        free = tl.where(free >= mean, free, mean)
        store_rows(FREE + (b * length * H + h) * D, start, H * D, inside, free, D, BD, first)


@triton.jit
def _store_total(LOG, b, h, t, length, weight, H):
    log_total = tl.where(weight > BARELY, weight, -float("inf"))
    place = (b * length + t) * H + h
    tl.store(LOG + place, log_total, mask=t < length)


@triton.jit(do_not_specialize=NUMBERS)
def read_again(
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, AGAIN, length, chunks, H, G, gated, marked,
    exclusive, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, E: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same as `read`, for chunks that it marked."""
    if tl.load(AGAIN + tl.program_id(0)) == 0:
        return
    c, bh = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // (H // G)
    t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
    reach, rest, whole, remainder = chunk_gates(
        GATE + b * g_b + g * g_h, c * C, g_t, real, gated, W if W == 1 else E, C, W
    )
    q = load_rows(Q + b * q_b + h * q_h, c * C, q_t, real, E, BE)
    place = (b * G + g) * (chunks + 1) + c
    for first in range(0, D, BD):
        column = first + tl.arange(0, BD)
        beta = tl.full([BD], 1.0, tl.float32)
        if ENERGETIC:
            beta = tl.load(BETA + g * D + column, mask=column < D, other=1).to(tl.float32)
        weight = tl.full([C], NOTHING, tl.float32)
        mean = tl.zeros([C, BD], tl.float32)
        energy = tl.full([C, BD], NOTHING, tl.float32)
        if STATE:
            for m in range(E):
                far = tl.sum(reach + rest, 1) if W == 1 else column_of(reach + rest, m)
                more = log_of(column_of(q, m)) + tl.load(LN + place * E + m) + far
                more = tl.where(real & (segment == 0) & (more > BARELY), more, NOTHING)
                at = (place * E + m) * D + column
                average = tl.load(AVG + at, mask=column < D, other=0)
                lme = tl.load(LME + at, mask=column < D, other=0)
                weight, mean, energy = _include(weight, mean, energy, more, average, lme)
        for i in range(tl.minimum(C, length - c * C)):
            seen = real & token_seen(t, real, segment, i, exclusive)
            far = (reach - row_of(reach, i)[None, :]) + (rest - row_of(rest, i)[None, :])
            key = token_row(K + b * k_b + g * k_h, c * C + i, k_t, E, BE)
            v = token_row(V + b * v_b + g * v_h + first, c * C + i, v_t, D - first, BD)
            more = score_of(q, key, far, seen, W)
            weight, mean, energy = _include(weight, mean, energy, more, v, v * beta)
        energy -= weight[:, None]
        _store(MEAN, FREE, b, h, c * C, length, weight, mean, energy, beta, first, H, D, BD, ENERGETIC)
        _store_total(LOG, b, h, t, length, weight, H)


@triton.jit
def token_row(X, t, step, width, WIDTH: tl.constexpr):
    """[WIDTH] in float32: the channels of one token."""
    column = tl.arange(0, WIDTH)
    return tl.load(X + t.to(tl.int64) * step + column, mask=column < width, other=0).to(tl.float32)


@triton.jit
def token_seen(t, real, segment, i, exclusive):
    """Which tokens [C] see token i of their chunk."""
    place = tl.arange(0, t.shape[0])
    own = tl.sum(tl.where(place == i, tl.where(real, segment, -1), 0), 0)
    return (place >= i + exclusive) & (segment == own)


@triton.jit
def score_of(q, key, far, seen, W: tl.constexpr):
    """log s_t(i) [C] of one token i with this key [BE], log decays far [C, W]."""
    both = q * key[None, :]
    if W == 1:
        weight = log_of(tl.sum(both, 1)) + tl.sum(far, 1)
    else:
        far = tl.where(both > 0, far, NOTHING)
        slowest = tl.max(far, 1)
        slowest = tl.where(slowest > BARELY, slowest, 0.0)
        weight = log_of(tl.sum(both * tl.exp(tl.minimum(far - slowest[:, None], 0.0)), 1)) + slowest
    return tl.where(seen & (weight > BARELY), weight, NOTHING)


@triton.jit
def _include(weight, mean, energy, more, v, z):
    """Add a value with this log weight [C]; energy is the log of the sum of exponentials here."""
    new = tl.where(tl.maximum(weight, more) > BARELY, add_logs(weight, more), NOTHING)
    share = tl.where(more > BARELY, tl.exp(tl.minimum(more - new, 0.0)), 0.0)
    mean += tl.where((more > BARELY)[:, None], share[:, None] * (v[None, :] - mean), 0.0)
    term = tl.where((more > BARELY)[:, None], more[:, None] + z[None, :], NOTHING)
    return new, mean, add_logs(energy, term)


@triton.jit(do_not_specialize=NUMBERS)
def step(
    Q, K, GATE, V, BETA, MARKS, FIRST, TOP, MEAN, FREE, LOG, LAST, LAST_TOP, H, G, gated, marked,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, E: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    W: tl.constexpr, ENERGETIC: tl.constexpr, STATE: tl.constexpr, EXCLUSIVE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """All rows of BD value channels."""
    bg, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD
    b, g = bg // G, bg % G
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    marks = tl.max(tl.load(MARKS + b + 0 * row, mask=row < BE * marked, other=0).to(tl.int32), 0)
    before = tl.full([BE], NOTHING, tl.float32)
    average, energy = tl.zeros([BE, BD], tl.float32), tl.zeros([BE, BD], tl.float32)
    if STATE:
        before, average, energy = load_state(FIRST, TOP, bg, first, E, D, BE, BD, ENERGETIC)
    before = tl.where((marks & 2) == 0, before, NOTHING)
    if W == 1:
        gate = tl.load(GATE + b * g_b + g * g_h + 0 * row, mask=row < E * gated, other=0).to(tl.float32)
    else:
        gate = tl.load(GATE + b * g_b + g * g_h + row, mask=row < E, other=0).to(tl.float32)
    before += tl.where((marks & 1) == 0, tl.maximum(gate, STRONGEST), 0.0)
    before = tl.where(before > BARELY, before, NOTHING)
    added = log_of(tl.load(K + b * k_b + g * k_h + row, mask=row < E, other=0).to(tl.float32))
    added = tl.where((marks & 1) == 0, added, NOTHING)
    v = tl.load(V + b * v_b + g * v_h + column, mask=column < D, other=0).to(tl.float32)
    v = tl.where((marks & 1) == 0, v, 0.0)
    beta = tl.full([BD], 1.0, tl.float32)
    if ENERGETIC:
        beta = tl.load(BETA + g * D + column, mask=column < D, other=1).to(tl.float32)
    weight = tl.where(tl.maximum(before, added) > BARELY, add_logs(before, added), NOTHING)
    old = tl.where(before > BARELY, before - weight, NOTHING)
    new = tl.where(added > BARELY, added - weight, NOTHING)
    new_average = tl.exp(old)[:, None] * average + tl.exp(new)[:, None] * v[None, :]
    z = (v * beta)[None, :]
    new_energy = tl.where((weight > BARELY)[:, None], mix(energy, old[:, None], z, new[:, None]), 0.0)
    if not EXCLUSIVE:
        average, energy, before = new_average, new_energy, weight
    for r in range(H // G):
        h = g * (H // G) + r
        q = log_of(tl.load(Q + b * q_b + h * q_h + row, mask=row < E, other=0).to(tl.float32)) + before
        q = tl.where((marks & 1) == 0, q, NOTHING)
        top = tl.max(q, 0)
        p = tl.where(q > BARELY, tl.exp(tl.minimum(q - top, 0.0)), 0.0)
        total = tl.sum(p, 0)
        p = p / tl.where(total > 0, total, 1.0)
        log_total = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
        mean = tl.sum(p[:, None] * average, 0)
        at = b * H + h
        tl.store(MEAN + at * D + column, mean, mask=column < D)
        tl.store(LOG + at + row, log_total, mask=row < tl.where(first == 0, 1, 0))
        if ENERGETIC:
            free = _log_mean_exp(p, energy) / beta
            free = tl.where(total > 0, tl.where(free >= mean, free, mean), 0.0)
            tl.store(FREE + at * D + column, free, mask=column < D)
    if KEEP:
        store_state(LAST, LAST_TOP, bg, first, weight, new_average, new_energy, E, D, BE, BD, ENERGETIC)


@triton.jit
def _log_mean_exp(p, energy):
    """log sum_m p[m] exp(energy[m]) [BD] at any range."""
    x, top, narrow = exponentials(energy, p > 0)
    close = top + log1p(tl.where(narrow, tl.sum(p[:, None] * x, 0), 0.0))
    terms = tl.where((p > 0)[:, None], log_of(p)[:, None] + energy, NOTHING)
    highest = tl.max(terms, 0)
    return tl.where(narrow, close, highest + tl.log(tl.sum(tl.exp(terms - highest[None, :]), 0)))
