"""Triton kernels of the decayed linear read: what the tokens of a stretch read (`read`), and all of it for one token
(`step`). A program walks through the chunks of its stretch and adds each to the state; see triton_states.

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
from femixer.kernels.decayed_linear.triton_states import (
    add_chunk,
    chunks_of,
    joined,
    load_state,
    own_place,
    store_state,
)
from femixer.kernels.triton_math import expm1, log1p, rolled


@triton.jit(do_not_specialize=NUMBERS)
def read(
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, AGAIN, length, stretches, steps, H, G, gated, marked,
    exclusive, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, E: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean, free energy and log total of a stretch's tokens, from the state before it."""
    s, bg = tl.program_id(0) % stretches, (tl.program_id(0) // stretches).to(tl.int64)
    b, g = bg // G, bg % G
    GATE += b * g_b + g * g_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    BETA += g * D
    place, own = bg * (stretches + 1) + s, own_place(stretches)
    count = chunks_of(s, steps, length, C)
    for i in tl.range(count, disable_licm=True):
        c = s * steps + i
        t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
        for r in tl.range(H // G, disable_licm=True):
            h = g * (H // G) + r
            doubts = _read_chunk(
                Q + b * q_b + h * q_h, K, GATE, V, BETA, LN, AVG, LME, MEAN, FREE, LOG, place, b, h, t, real, segment,
                c * C, length, H, gated, exclusive, q_t, k_t, v_t, g_t, E, D, C, BD, W, ENERGETIC, STATE, PRECISION,
            )  # fmt: skip
            tl.store(AGAIN + (b * H + h) * tl.cdiv(length, C) + c, doubts)
        if STATE:
            for _ in tl.range(i + 1, tl.minimum(i + 2, count), disable_licm=True):
                add_chunk(
                    K, GATE, V, BETA, LN, AVG, LME, place, own, c * C, length, k_t, v_t, g_t, real, segment, gated, 1,
                    E, D, C, R, BD, W, ENERGETIC, PRECISION,
                )  # fmt: skip
                place = own


@triton.jit
def _read_chunk(
    Q, K, GATE, V, BETA, LN, AVG, LME, MEAN, FREE, LOG, place, b, h, t, real, segment, start, length, H, gated,
    exclusive, q_t, k_t, v_t, g_t, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    W: tl.constexpr, ENERGETIC: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one head, from tokens up to them and the state at a place. How many doubts there are."""
    reach, rest, whole, remainder = chunk_gates(GATE, start, g_t, real, gated if W == 1 else 0, 1, C, 1)
    seen = visibility(real, segment, exclusive, C)
    scores = chunk_scores(Q, K, GATE, start, length, q_t, k_t, g_t, real, reach, rest, seen, E, C, W, PRECISION)
    total = tl.sum(scores, 1)
    weight = log_of(total)
    p = scores / tl.where(total > 0, total, 1.0)[:, None]
    LN += place * E
    AVG += place * E * D
    LME += place * E * D
    heard = real & (segment == 0)
    strongest, far = tl.min(whole), tl.full([C], NOTHING, tl.float32)
    if STATE or W > 1:
        for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
            coarse, fine, lowest = slice_gates(GATE, start, g_t, real, reach, rest, e, E, C, W)
            strongest = tl.minimum(strongest, lowest)
            if STATE:
                far = tl.maximum(far, tl.max(state_levels(LN, coarse, fine, e, E), 1))
    # Weights that strong decays leave nothing of, but that may be all there is.
    faint = (tl.max(seen.to(tl.int32), 1) > 0) & (tl.where(strongest < -20, total, 1.0) < FAINT)
    before, sums = tl.full([C], NOTHING, tl.float32), tl.zeros([C], tl.float32)
    if STATE:
        heard = heard & (far > BARELY)
        for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
            coarse, fine, lowest = slice_gates(GATE, start, g_t, real, reach, rest, e, E, C, W)
            level = state_levels(LN, coarse, fine, e, E)
            sums += tl.sum(_past(Q, start, q_t, heard, level, far, e, E), 1)
        faint = faint | (heard & (sums < FAINT))
        before = tl.where(sums > 0, log_of(sums) + far, NOTHING)
        sums = tl.where(sums > 0, 1 / tl.where(sums > 0, sums, 1.0), 0.0)
    all_weight, old, own = joined(before, weight)
    doubts = tl.max(faint.to(tl.int32))
    for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
        column = first + tl.arange(0, BD)
        v = load_rows(V, start, v_t, real, D, BD, first)
        mean = tl.exp(own)[:, None] * tl.dot(p, v, input_precision=PRECISION)
        energy = tl.zeros([C, BD], tl.float32)
        beta = tl.full([BD], 1.0, tl.float32)
        if ENERGETIC:
            beta = tl.load(BETA + column, mask=column < D, other=1).to(tl.float32)
            x, top, base = exponentials(v * beta[None, :], real)
            energy, unclear = log_ratio(tl.dot(p, x, input_precision=PRECISION), base)
            energy += top[None, :]
            doubts += tl.max((unclear & (weight > BARELY)[:, None]).to(tl.int32))
        if STATE:
            old_top, base = _state_range(LN, LME, first, length, E, D, BD, ENERGETIC)
            old_mean, old_energy = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
            for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
                coarse, fine, lowest = slice_gates(GATE, start, g_t, real, reach, rest, e, E, C, W)
                level = state_levels(LN, coarse, fine, e, E)
                past = _past(Q, start, q_t, heard, level, far, e, E) * sums[:, None]
                row = e + tl.arange(0, KEYS)
                average = load_rows(AVG, e, D, row < E, D, BD, first)
                old_mean = tl.dot(past, average, old_mean, input_precision=PRECISION)
                if ENERGETIC:
                    lme = load_rows(LME, e, D, row < E, D, BD, first) - old_top[None, :]
                    ln = tl.load(LN + row, mask=row < E, other=NOTHING)
                    lme = tl.where((ln > BARELY)[:, None], lme, 0.0)
                    powers = tl.where(base[None, :], expm1(lme), tl.exp(lme))
                    old_energy = tl.dot(past, powers, old_energy, input_precision=PRECISION)
            mean += tl.exp(old)[:, None] * old_mean
            if ENERGETIC:
                more, unclear = log_ratio(old_energy, base)
                doubts += tl.max((unclear & (before > BARELY)[:, None]).to(tl.int32))
                energy = mix(energy, own[:, None], more + old_top[None, :], old[:, None])
        _store(MEAN, FREE, b, h, start, length, all_weight, mean, energy, beta, first, H, D, BD, ENERGETIC)
    _store_total(LOG, b, h, t, length, all_weight, H)
    return doubts


@triton.jit
def _past(Q, start, step, heard, level, far, first, E: tl.constexpr):
    """Weights [C, KEYS] of rows of the state, relative to exp(far)."""
    q = load_rows(Q, start, step, heard, E, KEYS, first)
    return tl.where(heard[:, None], q * tl.exp(tl.minimum(level - far[:, None], 0.0)), 0.0)


@triton.jit
def _state_range(LN, LME, first, length, E: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ENERGETIC: tl.constexpr):
    """The largest log mean exponential of the state's rows [BD], and whether they are close together."""
    top, bottom = tl.full([BD], NOTHING, tl.float32), tl.full([BD], -NOTHING, tl.float32)
    if ENERGETIC:
        for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
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
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, AGAIN, length, stretches, steps, H, G, gated, marked,
    exclusive, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, E: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    STATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same as `read`, for chunks that it marked."""
    s, bg = tl.program_id(0) % stretches, (tl.program_id(0) // stretches).to(tl.int64)
    b, g = bg // G, bg % G
    AGAIN += (b * H + g * (H // G)) * tl.cdiv(length, C) + s * steps
    count = 0
    for i in range(chunks_of(s, steps, length, C)):
        for r in tl.range(H // G, disable_licm=True):
            count = tl.where(tl.load(AGAIN + r * tl.cdiv(length, C) + i) > 0, i + 1, count)
    GATE += b * g_b + g * g_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    BETA += g * D
    place, own = bg * (stretches + 1) + s, own_place(stretches)
    for i in tl.range(count, disable_licm=True):
        c = s * steps + i
        t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
        for r in tl.range(H // G, disable_licm=True):
            if tl.load(AGAIN + r * tl.cdiv(length, C) + i) > 0:
                h = g * (H // G) + r
                _read_exactly(
                    Q + b * q_b + h * q_h, K, GATE, V, BETA, LN, AVG, LME, MEAN, FREE, LOG, place, b, h, t, real,
                    segment, c * C, length, H, gated, exclusive, q_t, k_t, v_t, g_t, E, D, C, BE, BD, W, ENERGETIC,
                    STATE,
                )  # fmt: skip
        if STATE:
            for _ in tl.range(i + 1, tl.minimum(i + 2, count), disable_licm=True):
                add_chunk(
                    K, GATE, V, BETA, LN, AVG, LME, place, own, c * C, length, k_t, v_t, g_t, real, segment, gated, 1,
                    E, D, C, R, BD, W, ENERGETIC, PRECISION,
                )  # fmt: skip
                place = own


@triton.jit
def _read_exactly(
    Q, K, GATE, V, BETA, LN, AVG, LME, MEAN, FREE, LOG, place, b, h, t, real, segment, start, length, H, gated,
    exclusive, q_t, k_t, v_t, g_t, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BE: tl.constexpr,
    BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """As `_read_chunk`, row by row of the state and token by token."""
    reach, rest, whole, remainder = chunk_gates(GATE, start, g_t, real, gated, W if W == 1 else E, C, W)
    q = load_rows(Q, start, q_t, real, E, BE)
    for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
        column = first + tl.arange(0, BD)
        beta = tl.full([BD], 1.0, tl.float32)
        if ENERGETIC:
            beta = tl.load(BETA + column, mask=column < D, other=1).to(tl.float32)
        weight = tl.full([C], NOTHING, tl.float32)
        mean = tl.zeros([C, BD], tl.float32)
        energy = tl.full([C, BD], NOTHING, tl.float32)
        if STATE:
            for m in range(rolled(E, length)):
                far = tl.sum(reach + rest, 1) if W == 1 else column_of(reach, m) + column_of(rest, m)
                more = log_of(column_of(q, m)) + tl.load(LN + place * E + m) + far
                more = tl.where(real & (segment == 0) & (more > BARELY), more, NOTHING)
                at = (place * E + m) * D + column
                average = tl.load(AVG + at, mask=column < D, other=0)
                lme = tl.load(LME + at, mask=column < D, other=0)
                weight, mean, energy = _include(weight, mean, energy, more, average, lme)
        count = tl.minimum(C, length - start)
        if W > 1:  # with one gate per head it is the rolled loop that spills
            count = rolled(count, length)
        for i in range(count):
            seen = real & token_seen(t, real, segment, i, exclusive)
            far = (reach - row_of(reach, i)[None, :]) + (rest - row_of(rest, i)[None, :])
            key = token_row(K, start + i, k_t, E, BE)
            v = token_row(V + first, start + i, v_t, D - first, BD)
            more = score_of(q, key, far, seen, W)
            weight, mean, energy = _include(weight, mean, energy, more, v, v * beta)
        energy -= weight[:, None]
        _store(MEAN, FREE, b, h, start, length, weight, mean, energy, beta, first, H, D, BD, ENERGETIC)
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
    weight, old, new = joined(before, added)
    new_average = tl.exp(old)[:, None] * average + tl.exp(new)[:, None] * v[None, :]
    z = (v * beta)[None, :]
    new_energy = tl.where((weight > BARELY)[:, None], mix(energy, old[:, None], z, new[:, None]), 0.0)
    if not EXCLUSIVE:
        average, energy, before = new_average, new_energy, weight
    for r in tl.range(H // G, disable_licm=True):
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
