"""The queries' gradients of decayed linear attention, and what they share with those of keys. The forward kernels make
the states before the stretches again; then come the queries' gradients and those of the states that they read, what
reaches the states from all later stretches (triton_states.carry_back), and the gradients of keys, values, gates and
beta (triton_keys).

With s_t(i) the weights, W_t their total, c_t = to_log - sum_d (slope + to_mean mean) and slope = to_free / beta,

    W_t ds_t(i) = c_t + <to_mean, v_i> + sum_d slope exp(beta (v_i - F_t))
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
from femixer.kernels.decayed_linear.triton_states import across_chunk, add_chunk, chunks_of, load_energies, own_place
from femixer.kernels.triton_math import rolled

# Exponentials relative to the largest of a channel are multiplied by no more than exp of this.
RANGE = tl.constexpr(60.0)


@triton.jit
def log_totals(LOG, b, h, t, length, real, H):
    """Log total weights [C], and which tokens see anything."""
    place = (b * length + t) * H + h
    total = tl.load(LOG + place, mask=real, other=-float("inf"))
    there = total > BARELY
    return tl.where(there, total, 0.0), there


@triton.jit
def cotangents(
    TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, start, length, there, first, H, D: tl.constexpr,
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
        beta = tl.load(BETA + column, mask=column < D, other=1).to(tl.float32)
        to_free = load_rows(TO_FREE + out, start, H * D, there, D, BD, first)
        free = load_rows(FREE + out, start, H * D, there, D, BD, first)
        energy = free * beta[None, :]
        at_mean = free <= mean
        slope = tl.where(at_mean, 0.0, to_free / beta[None, :])
        to_mean += tl.where(at_mean, to_free, 0.0)
        through = slope * free
    return to_mean, slope, energy, -tl.sum(slope + to_mean * mean, 1), through


@triton.jit
def common_of(
    TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, start, length, there, H, by_log, D: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, ENERGETIC: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """c_t [C]"""
    place = (b * length + start + tl.arange(0, C)) * H + h
    common = tl.load(TO_LOG + place, mask=there & (tl.arange(0, C) < C * by_log), other=0).to(tl.float32)
    for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
        to_mean, slope, energy, more, through = cotangents(
            TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, start, length, there, first, H, D, BD, ENERGETIC,
            BY_MEAN, BY_FREE,
        )  # fmt: skip
        common += more
    return common


@triton.jit
def pair_terms(
    z,
    x,
    top,
    slope,
    energy,
    p,
    valid,
    length,
    C: tl.constexpr,
    N: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """With T = slope_t exp(z_n - energy_t) of z [N, BD], slope and energy [C, BD]: the sums of T over channels [C, N],
    and those over t weighted by p [C, N], [N, BD]. x = exp(z - top); energy counts for tokens that are valid."""
    low = tl.min(tl.where(valid[:, None], energy, -NOTHING), 0)
    if tl.max(tl.where(low < -BARELY, top - low, 0.0)) > RANGE:
        place, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        sums, weighted = tl.zeros([C, N], tl.float32), tl.zeros([N, BD], tl.float32)
        for n in range(tl.minimum(length, 0) + N):
            term = slope * exp_of(row_of(z, n)[None, :] - energy)
            sums += tl.where(column == n, tl.sum(term, 1)[:, None], 0.0)
            weighted += tl.where(place == n, tl.sum(term * column_of(p, n)[:, None], 0)[None, :], 0.0)
    else:
        y = slope * exp_of(top[None, :] - energy)
        sums = tl.dot(y, tl.trans(x), input_precision=PRECISION)
        weighted = x * tl.dot(tl.trans(p), y, input_precision=PRECISION)
    return sums, weighted


@triton.jit
def score_gradients(
    V, BETA, start, v_t, real, seen, there, total, reach, rest, common, TO_MEAN, TO_FREE, MEAN, FREE, b, h, length, H,
    D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr,
    PRECISION: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """ds_t(i) [C, C] of what is seen in a chunk; one gate per head has its decays in it."""
    own = tl.zeros([C, C], tl.float32) + common[:, None]
    for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
        to_mean, slope, energy, more, through = cotangents(
            TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, start, length, there, first, H, D, BD, ENERGETIC, BY_MEAN, BY_FREE
        )
        v = load_rows(V, start, v_t, real, D, BD, first)
        own += tl.dot(to_mean, tl.trans(v), input_precision=PRECISION)
        if ENERGETIC:
            column = first + tl.arange(0, BD)
            z = v * tl.load(BETA + column, mask=column < D, other=0).to(tl.float32)[None, :]
            x, top = exponents(z, real)
            sums, weighted = pair_terms(z, x, top, slope, energy, own, there, length, C, C, BD, PRECISION)
            own += sums
    return score_weights(own, seen, total, reach, rest, W)


@triton.jit
def score_weights(own, seen, total, reach, rest, W: tl.constexpr):
    """W_t ds_t(i) -> ds_t(i); one gate per head has its decays in it."""
    if W == 1:
        own *= exp_of(tl.where(seen, between(reach, rest), 0.0) - total[:, None])
    else:
        own *= exp_of(-total)[:, None]
    return tl.where(seen, own, 0.0)


@triton.jit
def through_channels(H, q, k, reach, rest, C: tl.constexpr, PRECISION: tl.constexpr):
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


# Counts of heads are constants: with numbers in their place addresses take more registers than there are.
@triton.jit(do_not_specialize=[name for name in NUMBERS if name not in ("H", "G")])
def query_gradients(
    Q, K, GATE, V, BETA, MARKS, LN, AVG, LME, MEAN, FREE, LOG, TO_MEAN, TO_FREE, TO_LOG, DN, DA, DE, DQ, FLOW,
    length, stretches, steps, gated, marked, by_log, exclusive, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t,
    g_h, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BE: tl.constexpr,
    BD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr, STATE: tl.constexpr,
    PRECISION: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Of q, and of the state before the stretch from what its tokens read of it. FLOW has the sums of q dq over the
    heads of a group, and over channels where gates are per head."""
    s, bg = tl.program_id(0) % stretches, (tl.program_id(0) // stretches).to(tl.int64)
    b, g = bg // G, bg % G
    GATE += b * g_b + g * g_h
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    BETA += g * D
    row = tl.arange(0, BE)
    begin, own_state = bg * (stretches + 1) + s, own_place(stretches)
    place = begin
    ln = tl.full([BE], NOTHING, tl.float32)
    if STATE:
        ln = tl.load(LN + place * E + row, mask=row < E, other=NOTHING)
    # Log weights of the state before the stretch, decayed up to the chunk; whether its segment goes on up to there.
    faded = tl.where(ln > BARELY, ln, 0.0)
    goes_on = 1
    total_n = tl.zeros([BE], tl.float32)
    count = chunks_of(s, steps, length, C)
    for i in tl.range(count, disable_licm=True):
        c = s * steps + i
        t, real, segment = chunk_marks(MARKS, b, c, length, marked, C)
        inside = t < length
        reach, rest, whole, remainder = chunk_gates(GATE, c * C, g_t, real, gated if W == 1 else 0, 1, C, 1)
        flow = tl.zeros([C], tl.float32)
        for r in tl.range(rolled(H // G, length), disable_licm=True):
            h = g * (H // G) + r
            QH = Q + b * q_b + h * q_h
            total, there = log_totals(LOG, b, h, t, length, real, H)
            common = common_of(
                TO_MEAN, TO_FREE, TO_LOG, MEAN, FREE, BETA, b, h, c * C, length, there, H, by_log, D, C, BD, ENERGETIC,
                BY_MEAN, BY_FREE,
            )  # fmt: skip
            seen = visibility(real, segment, exclusive, C) & there[:, None]
            own = score_gradients(
                V, BETA, c * C, v_t, real, seen, there, total, reach, rest, common, TO_MEAN, TO_FREE, MEAN, FREE, b, h,
                length, H, D, C, BD, W, ENERGETIC, PRECISION, BY_MEAN, BY_FREE,
            )  # fmt: skip
            for e in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
                q = load_rows(QH, c * C, q_t, real, E, KEYS, e)
                k = load_rows(K, c * C, k_t, real, E, KEYS, e)
                coarse, fine, lowest = slice_gates(GATE, c * C, g_t, real, reach, rest, e, E, C, W)
                if W == 1:
                    to_q = tl.dot(own, k, input_precision=PRECISION)
                else:
                    to_q, to_k = through_channels(own, q, k, coarse, fine, C, PRECISION)
                if STATE:
                    past = tl.zeros([C, KEYS], tl.float32) + common[:, None]
                    for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
                        to_mean, slope, energy, more, through = cotangents(
                            TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, c * C, length, there, first, H, D, BD, ENERGETIC,
                            BY_MEAN, BY_FREE,
                        )  # fmt: skip
                        past += _from_state(
                            AVG + place * E * D, LME + place * E * D, LN + place * E, to_mean, slope, energy, there, e,
                            first, length, E, D, C, BD, ENERGETIC, PRECISION,
                        )  # fmt: skip
                    level = state_levels(LN + place * E, coarse, fine, e, E)
                    past = past * exp_of(level - total[:, None])
                    to_q += tl.where((there & (segment == 0))[:, None], past, 0.0)
                store_rows(DQ + (b * length * H + h) * E, c * C, H * E, inside, to_q, E, KEYS, e)
                if W == 1:
                    flow += tl.sum(q * to_q, 1)
                else:
                    FLOWS = FLOW + (b * length * G + g) * E
                    flows = load_rows(FLOWS, c * C, G * E, t < tl.where(r > 0, length, 0), E, KEYS, e)
                    tl.debug_barrier()
                    store_rows(FLOWS, c * C, G * E, inside, flows + q * to_q, E, KEYS, e)
            if W > 1:
                tl.debug_barrier()
            if STATE:
                if goes_on > 0:
                    total_n += _state_gradients(
                        QH, GATE, BETA, LME, MEAN, FREE, TO_MEAN, TO_FREE, DA, DE, begin, ln, faded, b, h, c * C,
                        length, real, segment, gated, total, there, common, tl.where(i + r > 0, 1, 0), q_t, g_t, H, E,
                        D, C, BE, BD, W, ENERGETIC, PRECISION, BY_MEAN, BY_FREE,
                    )  # fmt: skip
        if W == 1:
            tl.store(FLOW + (b * length + t) * G + g, flow, mask=inside)
        if STATE:
            for _ in tl.range(i + 1, tl.minimum(i + 2, count), disable_licm=True):
                add_chunk(
                    K, GATE, V, BETA, LN, AVG, LME, place, own_state, c * C, length, k_t, v_t, g_t, real, segment,
                    gated, 1, E, D, C, R, BD, W, ENERGETIC, PRECISION,
                )  # fmt: skip
                across = across_chunk(GATE, c * C, g_t, real, segment, gated, E, C, W)
                place = own_state
                faded += tl.where(across > BARELY, across, 0.0)
                goes_on = tl.where(tl.max(segment, 0) > 0, 0, goes_on)
    if STATE:
        tl.store(DN + begin * E + row, total_n, mask=row < E)


@triton.jit
def _state_gradients(
    Q, GATE, BETA, LME, MEAN, FREE, TO_MEAN, TO_FREE, DA, DE, place, ln, faded, b, h, start, length, real, segment,
    gated, total, there, common, held, q_t, g_t, H: tl.constexpr, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
    BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr,
):  # fmt: skip
    """Of the state at a place with log weights ln, faded up to the chunk, from what the chunk's tokens read of it: that
    of the weights [BE]; the others are added to what is held."""
    row = tl.arange(0, BE)
    at = place * E * D
    reach, rest, whole, remainder = chunk_gates(GATE, start, g_t, real, gated, W if W == 1 else E, C, W)
    level = faded[None, :] + (reach + rest)
    q = load_rows(Q, start, q_t, real & (segment == 0), E, BE)
    share = tl.where(there[:, None], q * exp_of(level - total[:, None]), 0.0)
    for first in tl.range(0, rolled(D, length), BD, disable_licm=True):
        to_mean, slope, energy, more, through = cotangents(
            TO_MEAN, TO_FREE, MEAN, FREE, BETA, b, h, start, length, there, first, H, D, BD, ENERGETIC, BY_MEAN, BY_FREE
        )
        found = tl.dot(tl.trans(share), to_mean, input_precision=PRECISION)
        found += load_rows(DA + at, 0, D, row < E * held, D, BD, first)
        tl.debug_barrier()
        store_rows(DA + at, 0, D, row < E, found, D, BD, first)
        if ENERGETIC:
            lme, top = load_energies(LME + at, ln, 0, first, E, D, BD)
            low = tl.min(tl.where(there[:, None], energy, -NOTHING), 0)
            low = tl.where(low < -BARELY, low, 0.0)
            if tl.max(top - low) > RANGE:
                found = _shares_exactly(log_of(q) + level - total[:, None], lme, slope, energy, length, C, BE, BD)
            else:
                y = slope * tl.exp(tl.minimum(low[None, :] - energy, 0.0))
                found = exp_of(lme - low[None, :]) * tl.dot(tl.trans(share), y, input_precision=PRECISION)
            found += load_rows(DE + at, 0, D, row < E * held, D, BD, first)
            tl.debug_barrier()
            store_rows(DE + at, 0, D, row < E, found, D, BD, first)
    tl.debug_barrier()
    return tl.sum(share * common[:, None], 0)


@triton.jit
def _shares_exactly(level, lme, slope, energy, length, C: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr):
    """sum_t slope_t exp(level_t[m] + lme[m] - energy_t), [BE, BD], token by token."""
    found = tl.zeros([BE, BD], tl.float32)
    for i in range(rolled(C, length)):
        share = exp_of(row_of(tl.maximum(level, NOTHING), i)[:, None] + lme - row_of(energy, i)[None, :])
        found += share * row_of(slope, i)[None, :]
    return found


@triton.jit
def _from_state(
    AVG, LME, LN, to_mean, slope, energy, there, e, first, length, E: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BD: tl.constexpr, ENERGETIC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """<to_mean, mean of row m> + sum_d slope exp(lme_m - energy) [C, KEYS] over BD channels of KEYS rows of a state."""
    row = e + tl.arange(0, KEYS)
    average = load_rows(AVG, e, D, row < E, D, BD, first)
    found = tl.dot(to_mean, tl.trans(average), input_precision=PRECISION)
    if ENERGETIC:
        ln = tl.load(LN + row, mask=row < E, other=NOTHING)
        lme, top = load_energies(LME, ln, e, first, E, D, BD)
        powers = tl.exp(lme - top[None, :])
        sums, weighted = pair_terms(lme, powers, top, slope, energy, found, there, length, C, KEYS, BD, PRECISION)
        found += sums
    return found
