"""What the Triton kernels of the backward of decayed linear attention share. The forward kernels make the states before
the stretches again; then come the queries' gradients and those of the states that they read (triton_queries), what
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
    NOTHING,
    between,
    column_of,
    exp_of,
    exponents,
    in_blocks,
    load_rows,
    of_block,
    row_of,
    since_block_end,
    to_block_end,
)
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
