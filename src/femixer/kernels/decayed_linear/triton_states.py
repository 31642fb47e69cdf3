"""Triton kernels for the states of decayed linear attention: what every stretch adds (`sum_stretches`), the states
before the stretches (`carry`), and the gradients of both (`carry_back`).

A stretch is some chunks, through which a program walks one after the other. States lie in memory per stretch,
[B, G, N + 1, ...] in float32: log weight LN [E], mean AVG [E, D] and log mean exponential LME [E, D] of every row.
Place s + 1 has first what stretch s adds, then the state after it. Behind them every program has a place of its own for
the state inside its stretch (`own_place`), which is small enough to stay in a cache.

`disable_licm` and `rolled` keep compilers from computing addresses for the whole walk ahead: there are not enough
registers for them.

Gradients of a state's sums are kept times the sums themselves: DN [E] for the weight, DA [E, D] for the mean, DE [E, D]
for the exponentials. Each is then a sum of shares at most one, whatever the size of the sums. Empty rows count as one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.decayed_linear.triton_chunks import (
    BARELY,
    NOTHING,
    NUMBERS,
    add_logs,
    chunk_gates,
    chunk_marks,
    exp_of,
    exponentials,
    load_rows,
    log_of,
    log_ratio,
    mix,
    row_of,
    store_rows,
)
from femixer.kernels.triton_math import rolled


@triton.jit
def own_place(stretches):
    """The place behind all states that a program has for itself."""
    programs = tl.num_programs(0).to(tl.int64)
    return programs + programs // stretches + tl.program_id(0)


@triton.jit
def chunks_of(s, steps, length, C: tl.constexpr):
    """How many chunks stretch s has."""
    return tl.minimum(steps, tl.cdiv(length, C) - s * steps)


@triton.jit
def joined(kept, added):
    """Log weights of what is kept, of what is added, -> of both; and the logarithms of their shares."""
    kept = tl.where(kept > BARELY, kept, NOTHING)
    weight = tl.where(tl.maximum(kept, added) > BARELY, add_logs(kept, added), NOTHING)
    old = tl.where(kept > BARELY, kept - weight, NOTHING)
    new = tl.where(added > BARELY, added - weight, NOTHING)
    return weight, old, new


@triton.jit
def across_chunk(GATE, start, g_t, real, segment, gated, E: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """The log decay across a chunk [W]; NOTHING if a segment starts in it."""
    reach, rest, whole, remainder = chunk_gates(GATE, start, g_t, real, gated, W if W == 1 else E, C, W)
    return tl.where(tl.max(segment, 0) > 0, NOTHING, whole + remainder)


@triton.jit
def add_chunk(
    K, GATE, V, BETA, LN, AVG, LME, source, target, start, length, k_t, v_t, g_t, real, segment, gated, held,
    E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
    ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the state at place `source`, if one is held, to the one after a chunk, at place `target`, R rows at a time.
    The tokens since the last start of a segment are added.

    All threads must have written and read what lies there before; here they have in the end."""
    last = tl.max(segment, 0)
    live = real & (segment == last)
    for e in tl.range(0, rolled(E, length), R, disable_licm=True):
        row = e + tl.arange(0, R)
        reach, rest, whole, remainder = chunk_gates(
            GATE, start, g_t, real, gated, W if W == 1 else E, C, 1 if W == 1 else R, 0 if W == 1 else e
        )
        k = load_rows(K, start, k_t, live, E, R, e)
        # Keys at the chunk's end, in every row relative to the one that is decayed least.
        decay = ((whole[None, :] - reach) + (remainder[None, :] - rest)) + tl.zeros([C, R], tl.float32)
        slowest = tl.max(tl.where(k > 0, decay, NOTHING), 0)
        there = slowest > BARELY
        slowest = tl.where(there, slowest, 0.0)
        keys = k * tl.exp(tl.minimum(decay - slowest[None, :], 0.0))
        total = tl.sum(keys, 0)
        share = tl.trans(keys / tl.where(there, total, 1.0)[None, :])
        kept = tl.load(LN + source * E + row, mask=row < E * held, other=NOTHING)
        kept += tl.where(last > 0, NOTHING, whole + remainder)
        weight, old, new = joined(kept, tl.where(there, log_of(total) + slowest, NOTHING))
        tl.debug_barrier()  # whoever holds a copy has read it before it is written
        tl.store(LN + target * E + row, weight, mask=row < E)
        for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
            v = load_rows(V, start, v_t, live, D, BD, first)
            average = load_rows(AVG + source * E * D, e, D, row < E * held, D, BD, first)
            average = tl.exp(old)[:, None] * average
            average += tl.exp(new)[:, None] * tl.dot(share, v, input_precision=PRECISION)
            energy = tl.zeros([R, BD], tl.float32)
            if ENERGETIC:
                column = first + tl.arange(0, BD)
                z = v * tl.load(BETA + column, mask=column < D, other=0).to(tl.float32)[None, :]
                x, top, base = exponentials(z, live)
                more, faint = log_ratio(tl.dot(share, x, input_precision=PRECISION), base)
                more += top[None, :]
                if tl.max((faint & there[:, None]).to(tl.int32)) > 0:
                    level = log_of(k) + (decay - slowest[None, :]) - log_of(total)[None, :]
                    more = _sum_exactly(level, z, length, C, R, BD)
                energy = load_rows(LME + source * E * D, e, D, row < E * held, D, BD, first)
                energy = tl.where((weight > BARELY)[:, None], mix(energy, old[:, None], more, new[:, None]), 0.0)
            tl.debug_barrier()
            store_rows(AVG + target * E * D, e, D, row < E, average, D, BD, first)
            if ENERGETIC:
                store_rows(LME + target * E * D, e, D, row < E, energy, D, BD, first)
    tl.debug_barrier()


@triton.jit
def _sum_exactly(level, z, length, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr):
    """log sum_i exp(level_i[m] + z_i) [BE, BD], token by token."""
    energy = tl.full([BE, BD], NOTHING, tl.float32)
    for i in range(rolled(C, length)):
        weight = row_of(level, i)
        term = tl.where((weight > BARELY)[:, None], weight[:, None] + row_of(z, i)[None, :], NOTHING)
        energy = add_logs(energy, term)
    return energy


@triton.jit(do_not_specialize=NUMBERS)
def sum_stretches(
    K, GATE, V, BETA, MARKS, DECAY, LN, AVG, LME, length, stretches, steps, G, gated, marked,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What stretch s adds to the state, at its end; and the log decay across it."""
    s, bg = tl.program_id(0) % stretches, (tl.program_id(0) // stretches).to(tl.int64)
    b, g = bg // G, bg % G
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    GATE += b * g_b + g * g_h
    after = bg * (stretches + 1) + s + 1
    decay = tl.zeros([BE], tl.float32)
    for i in tl.range(chunks_of(s, steps, length, C), disable_licm=True):
        c = s * steps + i
        t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
        add_chunk(
            K, GATE, V, BETA + g * D, LN, AVG, LME, after, after, c * C, length, k_t, v_t, g_t, real, segment, gated,
            tl.minimum(i, 1), E, D, C, R, BD, W, ENERGETIC, PRECISION,
        )  # fmt: skip
        across = across_chunk(GATE, c * C, g_t, real, segment, gated, E, C, W)
        decay = tl.where(tl.minimum(decay, across) > BARELY, decay + across, NOTHING)
    row = tl.arange(0, BE)
    tl.store(DECAY + (bg * stretches + s) * E + row, decay, mask=row < E)


@triton.jit(do_not_specialize=["stretches"])
def carry(
    DECAY, ADDED, LN, AVG, LME, FIRST, TOP, LAST, LAST_TOP, stretches, E: tl.constexpr, D: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, STATE: tl.constexpr, ENERGETIC: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The states before every stretch and after the last, for all rows of BD value channels."""
    bg, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    inside = (row < E)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    weight = tl.full([BE], NOTHING, tl.float32)
    average, energy = tl.zeros([BE, BD], tl.float32), tl.zeros([BE, BD], tl.float32)
    if STATE:
        weight, average, energy = load_state(FIRST, TOP, bg, first, E, D, BE, BD, ENERGETIC)
    for s in range(stretches + 1):
        here = bg * (stretches + 1) + s
        tl.store(LN + here * E + row, weight, mask=row < tl.where(first == 0, E, 0))
        tl.store(AVG + here * E * D + at, average, mask=inside)
        if ENERGETIC:
            tl.store(LME + here * E * D + at, energy, mask=inside)
        if s < stretches:
            kept = weight + tl.load(DECAY + (bg * stretches + s) * E + row, mask=row < E, other=0)
            weight, old, new = joined(kept, tl.load(ADDED + (here + 1) * E + row, mask=row < E, other=NOTHING))
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


@triton.jit
def load_energies(LME, ln, start, first, E: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Log mean exponentials of a state [BE, BD], and the largest of every channel [BD], which empty rows have too."""
    row = start + tl.arange(0, ln.shape[0])
    lme = load_rows(LME, start, D, row < E, D, BD, first)
    top = tl.max(tl.where((ln > BARELY)[:, None], lme, NOTHING), 0)
    top = tl.where(top > BARELY, top, 0.0)
    return tl.where((ln > BARELY)[:, None], lme, top[None, :]), top


@triton.jit(do_not_specialize=["stretches"])
def carry_back(
    DECAY, LN, LME, READ_DN, DN, DA, DE, TOP, TO_LAST, TO_FIRST, stretches, E: tl.constexpr, D: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, STATE: tl.constexpr, ENERGETIC: tl.constexpr, BY_LAST: tl.constexpr,
):  # fmt: skip
    """Of the states before every stretch and after the last, from all that comes later, for BD value channels."""
    bg, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    inside = (row < E)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    COLUMNS: tl.constexpr = 2 * D + 1 if ENERGETIC else D + 1
    here = bg * (stretches + 1) + stretches
    ln = tl.load(LN + here * E + row, mask=row < E, other=NOTHING)
    lme, to_e = tl.zeros([BE, BD], tl.float32), tl.zeros([BE, BD], tl.float32)
    to_a, to_n = tl.zeros([BE, BD], tl.float32), tl.zeros([BE], tl.float32)
    if ENERGETIC:
        lme, top = load_energies(LME + here * E * D, ln, 0, first, E, D, BD)
    if BY_LAST:
        end = TO_LAST + bg * E * COLUMNS
        weight = tl.exp(ln)
        to_n = weight * tl.load(end + row * COLUMNS + D, mask=row < E, other=0).to(tl.float32)
        sums = row[:, None] * COLUMNS + column[None, :]
        to_a = weight[:, None] * tl.load(end + sums, mask=inside, other=0).to(tl.float32)
        if ENERGETIC:
            level = tl.where((ln > BARELY)[:, None], lme + ln[:, None], NOTHING)
            level = tl.where(level > BARELY, level - tl.max(level, 0)[None, :], NOTHING)
            to_e = tl.exp(tl.minimum(level, 0.0)) * tl.load(end + D + 1 + sums, mask=inside, other=0).to(tl.float32)
    ln = tl.where(ln > BARELY, ln, 0.0)
    for step in range(stretches + 1):
        here = bg * (stretches + 1) + stretches - step
        if step > 0:
            decay = tl.load(DECAY + (bg * stretches + stretches - step) * E + row, mask=row < E, other=0)
            held = tl.load(LN + here * E + row, mask=row < E, other=NOTHING)
            there = tl.where(held > BARELY, held, 0.0)
            kept = tl.where(decay > BARELY, there + decay - ln, NOTHING)
            to_n = exp_of(kept) * to_n + tl.load(READ_DN + here * E + row, mask=row < E, other=0)
            to_a = exp_of(kept)[:, None] * to_a + tl.load(DA + here * E * D + at, mask=inside, other=0)
            if ENERGETIC:
                old, top = load_energies(LME + here * E * D, held, 0, first, E, D, BD)
                share = exp_of(tl.where(kept[:, None] > BARELY, kept[:, None] + old - lme, NOTHING))
                to_e = share * to_e + tl.load(DE + here * E * D + at, mask=inside, other=0)
                lme = old
            ln = there
        tl.store(DN + here * E + row, to_n, mask=row < tl.where(first == 0, E, 0))
        tl.store(DA + here * E * D + at, to_a, mask=inside)
        if ENERGETIC:
            tl.store(DE + here * E * D + at, to_e, mask=inside)
    if STATE:
        sums = bg * E * COLUMNS + row * COLUMNS
        weight = exp_of(-ln)
        tl.store(TO_FIRST + sums + D, to_n * weight, mask=row < tl.where(first == 0, E, 0))
        tl.store(TO_FIRST + sums[:, None] + column[None, :], to_a * weight[:, None], mask=inside)
        if ENERGETIC:
            top = tl.maximum(tl.load(TOP + bg * D + column, mask=column < D, other=0).to(tl.float32), NOTHING)
            to_e *= exp_of(top[None, :] - lme - ln[:, None])
            tl.store(TO_FIRST + sums[:, None] + D + 1 + column[None, :], to_e, mask=inside)
