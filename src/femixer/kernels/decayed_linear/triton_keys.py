"""The Triton kernel of the gradients of keys, values, gates and beta, see triton_backward. A program walks through the
chunks of a stretch from its end to its beginning, with the gradients of the state after the chunk.

Inside a stretch the states themselves are not there. So gradients of a state's sums are kept times other numbers: where
a state has its log weight and log mean exponential, LN and LME have minus the logarithm of the largest term of a row,
and how much larger it is than that of a channel. Terms are at most one again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.decayed_linear.triton_backward import (
    RANGE,
    common_of,
    cotangents,
    log_totals,
    pair_terms,
    score_weights,
    through_channels,
)
from femixer.kernels.decayed_linear.triton_chunks import (
    BARELY,
    KEYS,
    NOTHING,
    NUMBERS,
    chunk_gates,
    chunk_marks,
    chunk_scores,
    exp_of,
    exponents,
    load_rows,
    log_of,
    row_of,
    slice_gates,
    store_rows,
    visibility,
)
from femixer.kernels.decayed_linear.triton_states import chunks_of, load_energies, own_place
from femixer.kernels.triton_math import rolled


@triton.jit(do_not_specialize=[name for name in NUMBERS if name not in ("H", "G")])
def key_gradients(
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, TO_MEAN, TO_FREE, TO_LOG, DN, DA, DE, FLOW, DK, DG, DV,
    SUM_K, SUM_V, SUM_BETA, ACROSS, length, stretches, steps, gated, marked, by_log, exclusive, q_b, q_t, q_h, k_b, k_t,
    k_h, v_b, v_t, v_h, g_b, g_t, g_h, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    STATE: tl.constexpr, WALK: tl.constexpr, PRECISION: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Of k, gate, v and, per stretch, beta. A gate's gradient is what flows across it: over the rest of the stretch the
    sum of q dq - k dk, and what flows across the stretch's end, which the state there and its gradient tell.

    First what readers of the chunk give, head by head; then what readers after it give. SUM_K and SUM_V have the sums
    of a chunk, of every program its own."""
    s, bg = tl.program_id(0) % stretches, (tl.program_id(0) // stretches).to(tl.int64)
    b, g = bg // G, bg % G
    GATE += b * g_b + g * g_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    BETA += g * D
    SUM_K += tl.program_id(0).to(tl.int64) * C * E
    SUM_V += tl.program_id(0).to(tl.int64) * C * D
    SUM_BETA += tl.program_id(0).to(tl.int64) * D
    place, own_state = bg * (stretches + 1) + s + 1, own_place(stretches)
    # What flows across the end of a chunk: ACROSS [E], and its sum, which is all that one gate per head needs.
    ACROSS += tl.program_id(0).to(tl.int64) * E
    across = _flow_across(LN, AVG, DN, DA, DE, ACROSS, place, length, E, D, BE, BD, ENERGETIC, STATE)
    count = 1  # known beforehand, so that there is no loop and registers are enough on an A100
    if WALK:
        count = chunks_of(s, steps, length, C)
    for i in tl.range(count, disable_licm=True):
        c = s * steps + count - 1 - i
        t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
        inside = t < length
        reach, rest, whole, remainder = chunk_gates(GATE, c * C, g_t, real, gated if W == 1 else 0, 1, C, 1)
        for r in tl.range(rolled(H // G, length), disable_licm=True):
            h = g * (H // G) + r
            QH = Q + b * q_b + h * q_h
            total, there = log_totals(LOG, b, h, t, length, real, H)
            common = common_of(
                TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, c * C, length, there, H, by_log, D, C, BD, ENERGETIC,
                BY_MEAN, BY_FREE,
            )  # fmt: skip
            seen = visibility(real, segment, exclusive, C) & there[:, None]
            p = chunk_scores(QH, K, GATE, c * C, length, q_t, k_t, g_t, real, reach, rest, seen, E, C, W, PRECISION)
            p *= exp_of(-total)[:, None]
            own = tl.zeros([C, C], tl.float32) + common[:, None]
            for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
                to_mean, slope, energy, more, through = cotangents(
                    TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, c * C, length, there, first, H, D, BD, ENERGETIC, BY_MEAN,
                    BY_FREE,
                )  # fmt: skip
                v = load_rows(V, c * C, v_t, real, D, BD, first)
                own += tl.dot(to_mean, tl.trans(v), input_precision=PRECISION)
                to_v = tl.dot(tl.trans(p), to_mean, input_precision=PRECISION)
                if ENERGETIC:
                    column = first + tl.arange(0, BD)
                    beta = tl.load(BETA + column, mask=column < D, other=0).to(tl.float32)
                    z = v * beta[None, :]
                    x, top = exponents(z, real)
                    sums, to_z = pair_terms(z, x, top, slope, energy, p, there, length, C, C, BD, PRECISION)
                    own += sums
                    to_v += to_z * beta[None, :]
                    to_beta = tl.load(SUM_BETA + column, mask=column < tl.where(i + r > 0, D, 0), other=0)
                    tl.debug_barrier()  # whoever holds a copy has read it before it is written
                    tl.store(SUM_BETA + column, to_beta + tl.sum(to_z * v - through, 0), mask=column < D)
                to_v += load_rows(SUM_V, 0, D, t < tl.where(r > 0, length, 0), D, BD, first)
                tl.debug_barrier()
                store_rows(SUM_V, 0, D, inside, to_v, D, BD, first)
            own = score_weights(own, seen, total, reach, rest, W)
            for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
                q = load_rows(QH, c * C, q_t, real, E, KEYS, e)
                if W == 1:
                    to_k = tl.dot(tl.trans(own), q, input_precision=PRECISION)
                else:
                    k = load_rows(K, c * C, k_t, real, E, KEYS, e)
                    coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
                    to_q, to_k = through_channels(own, q, k, coarse, fine, C, PRECISION)
                to_k += load_rows(SUM_K, 0, E, t < tl.where(r > 0, length, 0), E, KEYS, e)
                tl.debug_barrier()
                store_rows(SUM_K, 0, E, inside, to_k, E, KEYS, e)
            tl.debug_barrier()
        last = tl.max(segment, 0)
        live = real & (segment == last)
        flow = tl.zeros([C], tl.float32)
        if W == 1:
            flow = tl.load(FLOW + (b * length + t) * G + g, mask=inside, other=0)
        for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
            row = e + tl.arange(0, KEYS)
            k = load_rows(K, c * C, k_t, real, E, KEYS, e)
            to_k = load_rows(SUM_K, 0, E, inside, E, KEYS, e)
            if STATE:
                if W == 1:
                    until = (whole[None, :] - reach) + (remainder[None, :] - rest)
                else:
                    until = _until_end(GATE, c * C, g_t, real, e, E, C)
                ln = tl.load(LN + place * E + row, mask=row < E, other=NOTHING)
                until = tl.where(live[:, None], exp_of(until - tl.where(ln > BARELY, ln, 0.0)[None, :]), 0.0)
                after = tl.zeros([C, KEYS], tl.float32)
                after += tl.load(DN + place * E + row, mask=row < E, other=0)[None, :]
                for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
                    at = place * E * D
                    v = load_rows(V, c * C, v_t, real, D, BD, first)
                    to_a = load_rows(DA + at, e, D, row < E, D, BD, first)
                    after += tl.dot(v, tl.trans(to_a), input_precision=PRECISION)
                    to_v = load_rows(SUM_V, 0, D, inside, D, BD, first)
                    to_v += tl.dot(k * until, to_a, input_precision=PRECISION)
                    if ENERGETIC:
                        column = first + tl.arange(0, BD)
                        beta = tl.load(BETA + column, mask=column < D, other=0).to(tl.float32)
                        lme, highest = load_energies(LME + at, ln, e, first, E, D, BD)
                        to_e = load_rows(DE + at, e, D, row < E, D, BD, first)
                        z = v * beta[None, :]
                        x, top = exponents(z, live)
                        sums, to_z = pair_terms(
                            z, x, top, to_e, lme, tl.trans(k * until), ln > BARELY, length, KEYS, C, BD, PRECISION
                        )
                        after += tl.trans(sums)
                        to_v += to_z * beta[None, :]
                        to_beta = tl.load(SUM_BETA + column, mask=column < D, other=0)
                        tl.debug_barrier()
                        tl.store(SUM_BETA + column, to_beta + tl.sum(to_z * v, 0), mask=column < D)
                    tl.debug_barrier()
                    store_rows(SUM_V, 0, D, inside, to_v, D, BD, first)
                to_k += after * until
                tl.debug_barrier()
            store_rows(DK + (b * length * G + g) * E, c * C, G * E, inside, to_k, E, KEYS, e)
            if W == 1:
                flow -= tl.sum(k * to_k, 1)
            else:
                end = tl.load(ACROSS + row, mask=row < E, other=0)
                flows = load_rows(FLOW + (b * length * G + g) * E, c * C, G * E, inside, E, KEYS, e) - k * to_k
                begin, flows = _flows(flows, end, MARKS, b, t, real, segment, length, marked, C, PRECISION)
                tl.debug_barrier()
                tl.store(ACROSS + row, begin, mask=row < E)
                store_rows(DG + (b * length * G + g) * E, c * C, G * E, inside, flows, E, KEYS, e)
        if W == 1:
            order = tl.arange(0, C)
            later = (order[None, :] >= order[:, None]) & (segment[:, None] == segment[None, :])
            flow = tl.sum(tl.where(later, flow[None, :], 0.0), 1) + tl.where(segment == last, across, 0.0)
            across = tl.where(tl.min(segment, 0) == 0, tl.sum(tl.where(order == 0, flow, 0.0), 0), 0.0)
            marks = tl.load(MARKS + b * length + t, mask=t < length * marked, other=0).to(tl.int32)
            free = real & ((marks & 2) == 0)
            tl.store(DG + (b * length + t) * G + g, tl.where(free, flow, 0.0), mask=t < length * gated)
        tl.debug_barrier()
        for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
            to_v = load_rows(SUM_V, 0, D, inside, D, BD, first)
            store_rows(DV + (b * length * G + g) * D, c * C, G * D, inside, to_v, D, BD, first)
        tl.debug_barrier()
        if WALK:
            for _ in tl.range(i + 1, tl.minimum(i + 2, count), disable_licm=True):
                for r in tl.range(rolled(H // G, length), disable_licm=True):
                    h = g * (H // G) + r
                    total, there = log_totals(LOG, b, h, t, length, real, H)
                    common = common_of(
                        TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, c * C, length, there, H, by_log, D, C, BD,
                        ENERGETIC, BY_MEAN, BY_FREE,
                    )  # fmt: skip
                    _add_readers(
                        Q + b * q_b + h * q_h, GATE, BETA, LN, LME, MEAN, FREE, TO_MEAN, TO_FREE, DN, DA, DE, place,
                        own_state, b, h, c * C, length, real, segment, gated, total, there, common, q_t, g_t,
                        r, H, E, D, C, R, BD, W, ENERGETIC, PRECISION, BY_MEAN, BY_FREE,
                    )  # fmt: skip
                    place = own_state


@triton.jit
def _until_end(GATE, start, step, real, first, E: tl.constexpr, C: tl.constexpr):
    """Log decays [C, KEYS] from tokens to the chunk's end, for gates per channel."""
    reach, rest, whole, remainder = chunk_gates(GATE, start, step, real, 1, E, C, KEYS, first)
    return (whole[None, :] - reach) + (remainder[None, :] - rest)


@triton.jit
def _flows(flow, across, MARKS, b, t, real, segment, length, marked, C: tl.constexpr, PRECISION: tl.constexpr):
    """What flows across every token [C, ...] from flow = q dq - k dk and what flows across the chunk's end; the same
    across its beginning; and what of it gates have as gradients."""
    order = tl.arange(0, C)
    later = (order[None, :] >= order[:, None]) & (segment[:, None] == segment[None, :])
    flow = tl.dot(tl.where(later, 1.0, 0.0), flow, input_precision=PRECISION)
    flow += tl.where(segment == tl.max(segment, 0), 1.0, 0.0)[:, None] * across[None, :]
    begin = tl.where(tl.min(segment, 0) == 0, row_of(flow, 0), 0.0)
    marks = tl.load(MARKS + b * length + t, mask=t < length * marked, other=0).to(tl.int32)
    return begin, tl.where((real & ((marks & 2) == 0))[:, None], flow, 0.0)


@triton.jit
def _flow_across(
    LN, AVG, DN, DA, DE, ACROSS, place, length, E: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    ENERGETIC: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """What a state's sums times their gradients are, [E] to memory, and in all. Nothing flows through empty rows."""
    row = tl.arange(0, BE)
    flow = tl.zeros([BE], tl.float32)
    if STATE:
        flow += tl.load(DN + place * E + row, mask=row < E, other=0)
        for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
            to_a = load_rows(DA + place * E * D, 0, D, row < E, D, BD, first)
            flow += tl.sum(load_rows(AVG + place * E * D, 0, D, row < E, D, BD, first) * to_a, 1)
            if ENERGETIC:
                flow += tl.sum(load_rows(DE + place * E * D, 0, D, row < E, D, BD, first), 1)
        flow = tl.where(tl.load(LN + place * E + row, mask=row < E, other=NOTHING) > BARELY, flow, 0.0)
    tl.store(ACROSS + row, flow, mask=row < E)
    tl.debug_barrier()
    return tl.sum(flow, 0)


@triton.jit
def _add_readers(
    Q, GATE, BETA, LN, LME, MEAN, FREE, TO_MEAN, TO_FREE, DN, DA, DE, source, target, b, h, start, length, real,
    segment, gated, total, there, common, q_t, g_t, others, H: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    PRECISION: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """From the gradients of the state after a chunk, at place `source`, to those of the state before it, at `target`:
    with what tokens of the chunk read of it. others: how many heads of the group came before. R rows at a time."""
    for e in tl.range(0, rolled(E, length), R, disable_licm=True):
        row = e + tl.arange(0, R)
        reach, rest, whole, remainder = chunk_gates(
            GATE, start, g_t, real, gated, W if W == 1 else E, C, 1 if W == 1 else R, 0 if W == 1 else e
        )
        decay = tl.where(tl.max(segment, 0) > 0, NOTHING, whole + remainder) + tl.zeros([R], tl.float32)
        decay = tl.where(others > 0, 0.0, decay)
        ln = tl.load(LN + source * E + row, mask=row < E, other=NOTHING)
        kept = tl.where(decay > BARELY, decay - tl.where(ln > BARELY, ln, 0.0), NOTHING)
        q = load_rows(Q, start, q_t, there & (segment == 0), E, R, e)
        level = tl.where(q > 0, log_of(q) + (reach + rest) - total[:, None], NOTHING)
        highest = tl.max(level, 0)
        new = tl.maximum(kept, highest)
        scale = tl.where(new > BARELY, new, 0.0)
        fade, rise = tl.exp(kept - scale), tl.exp(highest - scale)
        share = tl.trans(tl.where(q > 0, tl.exp(level - highest[None, :]), 0.0))
        to_n = fade * tl.load(DN + source * E + row, mask=row < E, other=0) + rise * tl.sum(share * common[None, :], 1)
        tl.debug_barrier()
        tl.store(LN + target * E + row, tl.where(new > BARELY, -new, NOTHING), mask=row < E)
        tl.store(DN + target * E + row, to_n, mask=row < E)
        at, to = source * E * D, target * E * D
        for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
            to_mean, slope, energy, more, through = cotangents(
                TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, start, length, there, first, H, D, BD, ENERGETIC, BY_MEAN,
                BY_FREE,
            )  # fmt: skip
            to_a = fade[:, None] * load_rows(DA + at, e, D, row < E, D, BD, first)
            to_a += rise[:, None] * tl.dot(share, to_mean, input_precision=PRECISION)
            tl.debug_barrier()
            store_rows(DA + to, e, D, row < E, to_a, D, BD, first)
            if ENERGETIC:
                lme, top = load_energies(LME + at, ln, e, first, E, D, BD)
                to_e = load_rows(DE + at, e, D, row < E, D, BD, first)
                bound = tl.where((kept > BARELY)[:, None], kept[:, None] - lme, NOTHING)
                low = tl.min(tl.where(there[:, None], energy, -NOTHING), 0)
                high = tl.max(tl.where(there[:, None], energy, NOTHING), 0)
                if tl.max(high - low) > RANGE:
                    bound, to_e = _add_exactly(level, slope, energy, bound, to_e, length, C)
                else:
                    low = tl.where(low < -BARELY, low, 0.0)
                    own = tl.where((highest > BARELY)[:, None], highest[:, None] - low[None, :], NOTHING)
                    y = slope * tl.exp(tl.minimum(low[None, :] - energy, 0.0))
                    old, bound = bound, tl.maximum(bound, own)
                    safe = tl.where(bound > BARELY, bound, 0.0)
                    to_e = tl.exp(old - safe) * to_e + tl.exp(own - safe) * tl.dot(share, y, input_precision=PRECISION)
                tl.debug_barrier()
                store_rows(DE + to, e, D, row < E, to_e, D, BD, first)
                lme = tl.where(bound > BARELY, scale[:, None] - bound, 0.0)
                store_rows(LME + to, e, D, row < E, lme, D, BD, first)
    tl.debug_barrier()


@triton.jit
def _add_exactly(level, slope, energy, bound, to_e, length, C: tl.constexpr):
    """Add slope_t exp(level_t[m] - energy_t) of every token to what stands times exp(bound) [BE, BD], each bound being
    the largest exponent."""
    for i in range(rolled(C, length)):
        own = row_of(level, i)[:, None]
        own = tl.where(own > BARELY, own - row_of(energy, i)[None, :], NOTHING)
        old, bound = bound, tl.maximum(bound, own)
        safe = tl.where(bound > BARELY, bound, 0.0)
        to_e = tl.exp(old - safe) * to_e + tl.exp(own - safe) * row_of(slope, i)[None, :]
    return bound, to_e
