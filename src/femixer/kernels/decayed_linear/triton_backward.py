"""Triton kernels of the backward of decayed linear attention. The forward kernels make the states before the chunks
again; then come the gradients of what tokens read of them (`read_gradients`), of the states themselves (`carry_back`),
and of the tokens (`token_gradients`).

With s_t(i) the weights, W_t their total, c_t = to_log - sum_d (slope + to_mean mean) and slope = to_free / beta,

    W_t ds_t(i) = c_t + <to_mean, v_i> + sum_d slope exp(beta (v_i - F_t))

Gradients of a state's sums are kept times the sums themselves: DN [E] for the weight, DA [E, D] for the mean, DE [E, D]
for the exponentials. Each is then a sum of shares at most one, whatever the size of the sums. Empty rows count as one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.decayed_linear.triton_chunks import (
    BARELY,
    BLOCK,
    KEYS,
    NOTHING,
    NUMBERS,
    between,
    chunk_gates,
    chunk_marks,
    chunk_scores,
    column_of,
    exp_of,
    exponents,
    in_blocks,
    load_rows,
    log_of,
    of_block,
    row_of,
    since_block_end,
    slice_gates,
    state_levels,
    store_rows,
    to_block_end,
    visibility,
)

# Exponentials relative to the largest of a channel are multiplied by no more than exp of this.
RANGE = tl.constexpr(60.0)


@triton.jit
def _log_totals(LOG, b, h, t, length, real, H):
    """Log total weights [C], and which tokens see anything."""
    place = (b * length + t) * H + h
    total = tl.load(LOG + place, mask=real, other=-float("inf"))
    there = total > BARELY
    return tl.where(there, total, 0.0), there


@triton.jit
def _cotangents(
    TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, g, start, length, there, first, H, D: tl.constexpr,
    BD: tl.constexpr, ENERGETIC: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Gradient of the mean, slope, and beta F [C, BD]; what they add to c_t [C], and the slope times F."""
    out = (b * length * H + h) * D
    mean = load_rows(MEAN + out, start, H * D, there, D, BD, first)
    to_mean, slope, energy, through = mean * 0, mean * 0, mean * 0, mean * 0
    if BY_MEAN:
        to_mean = load_rows(TO_MEAN + out, start, H * D, there, D, BD, first)
    if ENERGETIC and BY_FREE:
        column = first + tl.arange(0, BD)
        beta = tl.load(BETA + g * D + column, mask=column < D, other=1).to(tl.float32)
        to_free = load_rows(TO_FREE + out, start, H * D, there, D, BD, first)
        free = load_rows(FREE + out, start, H * D, there, D, BD, first)
        energy = free * beta[None, :]
        at_mean = free <= mean
        slope = tl.where(at_mean, 0.0, to_free / beta[None, :])
        to_mean += tl.where(at_mean, to_free, 0.0)
        through = slope * free
    return to_mean, slope, energy, -tl.sum(slope + to_mean * mean, 1), through


@triton.jit
def _common(
    TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, g, start, length, there, H, by_log, D: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, ENERGETIC: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """c_t [C]"""
    place = (b * length + start + tl.arange(0, C)) * H + h
    common = tl.load(TO_LOG + place, mask=there & (tl.arange(0, C) < C * by_log), other=0).to(tl.float32)
    for first in range(0, D, BD):
        to_mean, slope, energy, more, through = _cotangents(
            TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, g, start, length, there, first, H, D, BD, ENERGETIC,
            BY_MEAN, BY_FREE,
        )  # fmt: skip
        common += more
    return common


@triton.jit
def _load_lme(LME, ln, start, first, E: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Log mean exponentials of a state [BE, BD], and the largest of every channel [BD], which empty rows have too."""
    row = start + tl.arange(0, ln.shape[0])
    lme = load_rows(LME, start, D, row < E, D, BD, first)
    top = tl.max(tl.where((ln > BARELY)[:, None], lme, NOTHING), 0)
    top = tl.where(top > BARELY, top, 0.0)
    return tl.where((ln > BARELY)[:, None], lme, top[None, :]), top


@triton.jit(do_not_specialize=NUMBERS)
def read_gradients(
    Q, GATE, BETA, MARKS, LN, LME, MEAN, FREE, LOG, TO_MEAN, TO_FREE, TO_LOG, DN, DA, DE, length, chunks, H, G,
    gated, marked, by_log, q_b, q_t, q_h, g_b, g_t, g_h, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
    BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Of the state before chunk c, from what the chunk's tokens read of it."""
    c, bg = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, g = bg // G, bg % G
    t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
    reach, rest, whole, remainder = chunk_gates(
        GATE + b * g_b + g * g_h, c * C, g_t, real, gated, W if W == 1 else E, C, W
    )
    row = tl.arange(0, BE)
    place = bg * (chunks + 1) + c
    ln = tl.load(LN + place * E + row, mask=row < E, other=NOTHING)
    level = tl.where(ln > BARELY, ln, 0.0)[None, :] + (reach + rest)
    total_n = tl.zeros([BE], tl.float32)
    for r in range(H // G):
        h = g * (H // G) + r
        q = load_rows(Q + b * q_b + h * q_h, c * C, q_t, real & (segment == 0), E, BE)
        total, there = _log_totals(LOG, b, h, t, length, real, H)
        common = _common(
            TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, g, c * C, length, there, H, by_log, D, C, BD,
            ENERGETIC, BY_MEAN, BY_FREE,
        )  # fmt: skip
        share = tl.where(there[:, None], q * exp_of(level - total[:, None]), 0.0)
        total_n += tl.sum(share * common[:, None], 0)
        for first in range(0, D, BD):
            to_mean, slope, energy, more, through = _cotangents(
                TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, g, c * C, length, there, first, H, D, BD, ENERGETIC,
                BY_MEAN, BY_FREE,
            )  # fmt: skip
            before = row < tl.where(r > 0, E, 0)
            at = place * E * D
            found = tl.dot(tl.trans(share), to_mean, input_precision=PRECISION)
            found += load_rows(DA + at, 0, D, before, D, BD, first)
            store_rows(DA + at, 0, D, row < E, found, D, BD, first)
            if ENERGETIC:
                lme, top = _load_lme(LME + at, ln, 0, first, E, D, BD)
                low = tl.min(tl.where(there[:, None], energy, -NOTHING), 0)
                low = tl.where(low < -BARELY, low, 0.0)
                if tl.max(top - low) > RANGE:
                    found = _shares_exactly(log_of(q) + level - total[:, None], lme, slope, energy, C, BE, BD)
                else:
                    y = slope * tl.exp(tl.minimum(low[None, :] - energy, 0.0))
                    found = exp_of(lme - low[None, :]) * tl.dot(tl.trans(share), y, input_precision=PRECISION)
                found += load_rows(DE + at, 0, D, before, D, BD, first)
                store_rows(DE + at, 0, D, row < E, found, D, BD, first)
    tl.store(DN + place * E + row, total_n, mask=row < E)


@triton.jit
def _shares_exactly(level, lme, slope, energy, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr):
    """sum_t slope_t exp(level_t[m] + lme[m] - energy_t), [BE, BD], token by token."""
    found = tl.zeros([BE, BD], tl.float32)
    for i in range(C):
        share = exp_of(row_of(tl.maximum(level, NOTHING), i)[:, None] + lme - row_of(energy, i)[None, :])
        found += share * row_of(slope, i)[None, :]
    return found


@triton.jit(do_not_specialize=["chunks"])
def carry_back(
    DECAY, LN, LME, READ_DN, DN, DA, DE, TOP, TO_LAST, TO_FIRST, chunks, E: tl.constexpr, D: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, STATE: tl.constexpr, ENERGETIC: tl.constexpr, BY_LAST: tl.constexpr,
):  # fmt: skip
    """Of the states before every chunk and after the last, from all that comes later, for BD value channels."""
    bg, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    inside = (row < E)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    COLUMNS: tl.constexpr = 2 * D + 1 if ENERGETIC else D + 1
    here = bg * (chunks + 1) + chunks
    ln = tl.load(LN + here * E + row, mask=row < E, other=NOTHING)
    lme, to_e = tl.zeros([BE, BD], tl.float32), tl.zeros([BE, BD], tl.float32)
    to_a, to_n = tl.zeros([BE, BD], tl.float32), tl.zeros([BE], tl.float32)
    if ENERGETIC:
        lme, top = _load_lme(LME + here * E * D, ln, 0, first, E, D, BD)
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
    for step in range(chunks + 1):
        here = bg * (chunks + 1) + chunks - step
        if step > 0:
            decay = tl.load(DECAY + (bg * chunks + chunks - step) * E + row, mask=row < E, other=0)
            held = tl.load(LN + here * E + row, mask=row < E, other=NOTHING)
            there = tl.where(held > BARELY, held, 0.0)
            kept = tl.where(decay > BARELY, there + decay - ln, NOTHING)
            to_n = exp_of(kept) * to_n + tl.load(READ_DN + here * E + row, mask=row < E, other=0)
            to_a = exp_of(kept)[:, None] * to_a + tl.load(DA + here * E * D + at, mask=inside, other=0)
            if ENERGETIC:
                old, top = _load_lme(LME + here * E * D, held, 0, first, E, D, BD)
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


@triton.jit
def _pair_terms(
    z, x, top, slope, energy, p, valid, C: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr
):
    """With T = slope_t exp(z_n - energy_t) of z [N, BD], slope and energy [C, BD]: the sums of T over channels [C, N],
    and those over t weighted by p [C, N], [N, BD]. x = exp(z - top); energy counts for tokens that are valid."""
    low = tl.min(tl.where(valid[:, None], energy, -NOTHING), 0)
    if tl.max(tl.where(low < -BARELY, top - low, 0.0)) > RANGE:
        place, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        sums, weighted = tl.zeros([C, N], tl.float32), tl.zeros([N, BD], tl.float32)
        for n in range(N):
            term = slope * exp_of(row_of(z, n)[None, :] - energy)
            sums += tl.where(column == n, tl.sum(term, 1)[:, None], 0.0)
            weighted += tl.where(place == n, tl.sum(term * column_of(p, n)[:, None], 0)[None, :], 0.0)
    else:
        y = slope * exp_of(top[None, :] - energy)
        sums = tl.dot(y, tl.trans(x), input_precision=PRECISION)
        weighted = x * tl.dot(tl.trans(p), y, input_precision=PRECISION)
    return sums, weighted


@triton.jit
def _through_scores(own, q, k, reach, rest, C: tl.constexpr, W: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of q and k [C, KEYS] from those of the scores; one gate per head has its decays in `own` already."""
    if W == 1:
        to_q = tl.dot(own, k, input_precision=PRECISION)
        to_k = tl.dot(tl.trans(own), q, input_precision=PRECISION)
    else:
        to_q, to_k = _through_channels(own, q, k, reach, rest, C, PRECISION)
    return to_q, to_k


@triton.jit
def _through_channels(H, q, k, reach, rest, C: tl.constexpr, PRECISION: tl.constexpr):
    to_q, to_k = q * 0, k * 0
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    if C > BLOCK:
        until = tl.exp(to_block_end(reach, rest))
        for j in tl.static_range(C // BLOCK - 1):
            since = tl.exp(since_block_end(reach, rest, j))
            later = tl.where((column // BLOCK == j) & (row // BLOCK > j), H, 0.0)
            to_q += since * tl.dot(later, k * until, input_precision=PRECISION)
            to_k += until * tl.dot(tl.trans(later), q * since, input_precision=PRECISION)
    q3, k3, far, near = in_blocks(q), in_blocks(k), in_blocks(reach), in_blocks(rest)
    place = tl.arange(0, BLOCK)[None, :, None]
    to_q3, to_k3 = q3 * 0, k3 * 0
    for i in range(BLOCK):
        own = tl.sum(tl.where(column == row // BLOCK * BLOCK + i, H, 0.0), 1)
        decay = tl.exp(tl.minimum((far - of_block(far, i)) + (near - of_block(near, i)), 0.0))
        decay *= in_blocks(own[:, None])
        to_q3 += of_block(k3, i) * decay
        to_k3 += tl.where(place == i, tl.sum(q3 * decay, 1)[:, None, :], 0.0)
    return to_q + tl.reshape(to_q3, (C, q.shape[1])), to_k + tl.reshape(to_k3, (C, q.shape[1]))


@triton.jit
def _from_state(
    AVG, LME, LN, to_mean, slope, energy, there, e, first, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """<to_mean, mean of row m> + sum_d slope exp(lme_m - energy) [C, KEYS] over BD channels of KEYS rows of a state."""
    row = e + tl.arange(0, KEYS)
    average = load_rows(AVG, e, D, row < E, D, BD, first)
    found = tl.dot(to_mean, tl.trans(average), input_precision=PRECISION)
    if ENERGETIC:
        ln = tl.load(LN + row, mask=row < E, other=NOTHING)
        lme, top = _load_lme(LME, ln, e, first, E, D, BD)
        powers = tl.exp(lme - top[None, :])
        sums, weighted = _pair_terms(lme, powers, top, slope, energy, found, there, C, KEYS, BD, PRECISION)
        found += sums
    return found


@triton.jit(do_not_specialize=[name for name in NUMBERS if name not in ("H", "G")])
def token_gradients(
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, TO_MEAN, TO_FREE, TO_LOG, DN, DA, DE, DQ, DK, DG,
    DV, SUM_Q, SUM_K, SUM_G, SUM_V, SUM_BETA, length, chunks, gated, marked, by_log, exclusive,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, H: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
    ENERGETIC: tl.constexpr, STATE: tl.constexpr, PRECISION: tl.constexpr, ROUNDED: tl.constexpr,
    BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Of q, k, gate, v and, per chunk, beta. A gate's gradient is what flows across it: over the rest of the chunk the
    sum of q dq - k dk, and what flows across the chunk's end, which the state there and its gradient tell.

    First what readers of the chunk give, head by head; then what readers after it give. Sums lie in memory, in float32.
    """
    c, bg = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    b, g = bg // G, bg % G
    t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
    inside = t < length
    GATE += b * g_b + g * g_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    SUM_V += (b * length * G + g) * D
    SUM_K += (b * length * G + g) * E
    SUM_G += (b * length * G + g) * E
    SUM_BETA += (bg * chunks + c) * D
    reach, rest, whole, remainder = chunk_gates(GATE, c * C, g_t, real, gated if W == 1 else 0, 1, C, 1)
    place = bg * (chunks + 1) + c
    flow = tl.zeros([C], tl.float32)
    for r in range(H // G):
        h = g * (H // G) + r
        QH = Q + b * q_b + h * q_h
        total, there = _log_totals(LOG, b, h, t, length, real, H)
        common = _common(
            TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, g, c * C, length, there, H, by_log, D, C, BD,
            ENERGETIC, BY_MEAN, BY_FREE,
        )  # fmt: skip
        if STATE:
            for e in range(0, E, KEYS):
                past = tl.zeros([C, KEYS], tl.float32) + common[:, None]
                for first in range(0, D, BD):
                    to_mean, slope, energy, more, through = _cotangents(
                        TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, g, c * C, length, there, first, H, D, BD,
                        ENERGETIC, BY_MEAN, BY_FREE,
                    )  # fmt: skip
                    past += _from_state(
                        AVG + place * E * D, LME + place * E * D, LN + place * E, to_mean, slope, energy, there, e,
                        first, E, D, C, BD, ENERGETIC, PRECISION,
                    )  # fmt: skip
                coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
                level = state_levels(LN + place * E, coarse, fine, e, E)
                past = tl.where((there & (segment == 0))[:, None], past * exp_of(level - total[:, None]), 0.0)
                store_rows(SUM_Q + (b * length * H + h) * E, c * C, H * E, inside, past, E, KEYS, e)
            tl.debug_barrier()
        seen = visibility(real, segment, exclusive, C) & there[:, None]
        p = chunk_scores(QH, K, GATE, c * C, q_t, k_t, g_t, real, reach, rest, seen, E, C, W, PRECISION)
        p *= exp_of(-total)[:, None]
        own = tl.zeros([C, C], tl.float32) + common[:, None]
        for first in range(0, D, BD):
            to_mean, slope, energy, more, through = _cotangents(
                TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, g, c * C, length, there, first, H, D, BD, ENERGETIC,
                BY_MEAN, BY_FREE,
            )  # fmt: skip
            v = load_rows(V, c * C, v_t, real, D, BD, first)
            own += tl.dot(to_mean, tl.trans(v), input_precision=PRECISION)
            to_v = tl.dot(tl.trans(p), to_mean, input_precision=PRECISION)
            if ENERGETIC:
                column = first + tl.arange(0, BD)
                beta = tl.load(BETA + g * D + column, mask=column < D, other=0).to(tl.float32)
                z = v * beta[None, :]
                x, top = exponents(z, real)
                sums, to_z = _pair_terms(z, x, top, slope, energy, p, there, C, C, BD, PRECISION)
                own += sums
                to_v += to_z * beta[None, :]
                to_beta = tl.load(SUM_BETA + column, mask=column < tl.where(r > 0, D, 0), other=0)
                tl.debug_barrier()  # whoever holds a copy has read it before it is written
                tl.store(SUM_BETA + column, to_beta + tl.sum(to_z * v - through, 0), mask=column < D)
            to_v += load_rows(SUM_V, c * C, G * D, t < tl.where(r > 0, length, 0), D, BD, first)
            tl.debug_barrier()
            store_rows(SUM_V, c * C, G * D, inside, to_v, D, BD, first)
        if W == 1:
            own *= exp_of(tl.where(seen, between(reach, rest), 0.0) - total[:, None])
        else:
            own *= exp_of(-total)[:, None]
        own = tl.where(seen, own, 0.0)
        for e in range(0, E, KEYS):
            q = load_rows(QH, c * C, q_t, real, E, KEYS, e)
            k = load_rows(K, c * C, k_t, real, E, KEYS, e)
            coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
            to_q, to_k = _through_scores(own, q, k, coarse, fine, C, W, PRECISION)
            if STATE:
                to_q += load_rows(SUM_Q + (b * length * H + h) * E, c * C, H * E, inside, E, KEYS, e)
            store_rows(DQ + (b * length * H + h) * E, c * C, H * E, inside, to_q, E, KEYS, e)
            held = t < tl.where(r > 0, length, 0)
            to_k += load_rows(SUM_K, c * C, G * E, held, E, KEYS, e)
            tl.debug_barrier()
            store_rows(SUM_K, c * C, G * E, inside, to_k, E, KEYS, e)
            if W == 1:
                flow += tl.sum(q * to_q, 1)
            else:
                flows = q * to_q + load_rows(SUM_G, c * C, G * E, held, E, KEYS, e)
                tl.debug_barrier()
                store_rows(SUM_G, c * C, G * E, inside, flows, E, KEYS, e)
        tl.debug_barrier()
    tl.debug_barrier()
    last = tl.max(segment, 0)
    live = real & (segment == last)
    marks = tl.load(MARKS + b * length + t, mask=t < length * marked, other=0).to(tl.int32)
    free = real & ((marks & 2) == 0)
    order = tl.arange(0, C)
    later = (order[None, :] >= order[:, None]) & (segment[:, None] == segment[None, :])
    goes_on = tl.where(segment == last, 1.0, 0.0)
    across = 0.0
    place += 1
    for e in range(0, E, KEYS):
        row = e + tl.arange(0, KEYS)
        k = load_rows(K, c * C, k_t, real, E, KEYS, e)
        to_k = load_rows(SUM_K, c * C, G * E, inside, E, KEYS, e)
        end_flow = tl.zeros([KEYS], tl.float32)
        if STATE:
            if W == 1:
                until = (whole[None, :] - reach) + (remainder[None, :] - rest)
            else:
                until = _until_end(GATE, c * C, g_t, real, e, E, C)
            ln = tl.load(LN + place * E + row, mask=row < E, other=NOTHING)
            until = tl.where(live[:, None], exp_of(until - tl.where(ln > BARELY, ln, 0.0)[None, :]), 0.0)
            end_flow = tl.load(DN + place * E + row, mask=row < E, other=0)
            after = tl.zeros([C, KEYS], tl.float32) + end_flow[None, :]
            for first in range(0, D, BD):
                at = place * E * D
                v = load_rows(V, c * C, v_t, real, D, BD, first)
                to_a = load_rows(DA + at, e, D, row < E, D, BD, first)
                average = load_rows(AVG + at, e, D, row < E, D, BD, first)
                end_flow += tl.sum(average * to_a, 1)
                after += tl.dot(v, tl.trans(to_a), input_precision=PRECISION)
                to_v = load_rows(SUM_V, c * C, G * D, inside, D, BD, first)
                to_v += tl.dot(k * until, to_a, input_precision=PRECISION)
                if ENERGETIC:
                    column = first + tl.arange(0, BD)
                    beta = tl.load(BETA + g * D + column, mask=column < D, other=0).to(tl.float32)
                    lme, highest = _load_lme(LME + at, ln, e, first, E, D, BD)
                    to_e = load_rows(DE + at, e, D, row < E, D, BD, first)
                    end_flow += tl.sum(to_e, 1)
                    z = v * beta[None, :]
                    x, top = exponents(z, live)
                    sums, to_z = _pair_terms(
                        z, x, top, to_e, lme, tl.trans(k * until), ln > BARELY, KEYS, C, BD, PRECISION
                    )
                    after += tl.trans(sums)
                    to_v += to_z * beta[None, :]
                    to_beta = tl.load(SUM_BETA + column, mask=column < D, other=0)
                    tl.debug_barrier()
                    tl.store(SUM_BETA + column, to_beta + tl.sum(to_z * v, 0), mask=column < D)
                tl.debug_barrier()
                store_rows(SUM_V, c * C, G * D, inside, to_v, D, BD, first)
            to_k += after * until
            tl.debug_barrier()
        store_rows(DK + (b * length * G + g) * E, c * C, G * E, inside, to_k, E, KEYS, e)
        if W == 1:
            flow -= tl.sum(k * to_k, 1)
            across += tl.sum(end_flow)
        else:
            flows = load_rows(SUM_G, c * C, G * E, inside, E, KEYS, e) - k * to_k
            flows = tl.dot(tl.where(later, 1.0, 0.0), flows, input_precision=PRECISION)
            flows = tl.where(free[:, None], flows + goes_on[:, None] * end_flow[None, :], 0.0)
            store_rows(DG + (b * length * G + g) * E, c * C, G * E, inside, flows, E, KEYS, e)
    if W == 1:
        flow = tl.sum(tl.where(later, flow[None, :], 0.0), 1) + goes_on * across
        tl.store(DG + (b * length + t) * G + g, tl.where(free, flow, 0.0), mask=t < length * gated)
    if ROUNDED:
        tl.debug_barrier()
        for first in range(0, D, BD):
            to_v = load_rows(SUM_V, c * C, G * D, inside, D, BD, first)
            store_rows(DV + (b * length * G + g) * D, c * C, G * D, inside, to_v, D, BD, first)


@triton.jit
def _until_end(GATE, start, step, real, first, E: tl.constexpr, C: tl.constexpr):
    """Log decays [C, KEYS] from tokens to the chunk's end, for gates per channel."""
    reach, rest, whole, remainder = chunk_gates(GATE, start, step, real, 1, E, C, KEYS, first)
    return (whole[None, :] - reach) + (remainder[None, :] - rest)
