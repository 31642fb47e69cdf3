"""Compiled loops of the softmax read of short sequences, float32 in and out.

LANES pairs of sequence and head are read side by side, as the last axis of all scratch arrays, so that every loop
within is as long as the machine's vectors whatever the width of a head. Its end is an array's size and not LANES
itself: loops of a known length LLVM unrolls into scalars. Sums are float64.

Axes: B batch, T queries, S keys, H heads, G key/value heads, E key width, D value width.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.numba_kernel import inline, job, kernel
from femixer.kernels.numba_math import exp, exp32, f32, log

LANES = 32
# Sums of exponentials below exp(-NATS) may have lost terms: their head is read again.
NATS = 60.0
# Exponentials of float32 arguments will do for a channel whose values lie at most so far apart: then F = log(.) / beta
# has the digits, as an error of the argument beta (v - top) is divided by beta.
RANGE = 50.0


@kernel
def forward(q, k, v, beta, segments_q, segments_k, causal, scale, mean, free, log_z, again):  # type: ignore[no-untyped-def]
    """mean, free [B, T, H, D] and log_z [B, T, H]; again [B, H]: where F is not good. beta [G, D] and the segments
    [B, T] and [B, S] may be empty: none."""
    for task in prange(-(-q.shape[0] * q.shape[2] // LANES)):
        _forward(task * LANES, q, k, v, beta, segments_q, segments_k, causal, scale, mean, free, log_z, again)


@job
def _forward(first, q, k, v, beta, segments_q, segments_k, causal, scale, mean, free, log_z, again):  # type: ignore[no-untyped-def]
    length, keys, depth, lanes = q.shape[1], k.shape[1], v.shape[3], _lanes(first, q)
    kt, vt, inverse = _loaded(first, lanes, q, k, v, beta)
    top, et = np.empty((depth, LANES)), np.empty((keys if beta.size else 0, depth, LANES))
    if beta.size:
        _exponentials(vt, inverse, top, et)
    query, s = np.empty((q.shape[3], LANES), dtype=f32), np.empty((keys, LANES), dtype=f32)
    highest, total, average, partial = np.empty(LANES, dtype=f32), np.empty(LANES), np.empty(LANES), np.empty(LANES)
    lowest = np.zeros(LANES)
    for t in range(length):
        n = keys - length + t + 1 if causal else keys
        _scores(first, lanes, t, q, kt, segments_q, segments_k, scale, n, query, s, highest)
        _weigh(s, highest, n, total)
        for lane in range(lanes):
            b, h = _place(first + lane, q)
            log_z[b, t, h] = highest[lane] + math.log(total[lane]) if total[lane] != 0 else 0.0
        for d in range(depth):
            _sum(s, vt, d, n, total, average)
            if beta.size:
                _sum(s, et, d, n, total, partial)
                _logarithm(top[d], inverse[d], total, partial, lowest)
            for lane in range(lanes):
                b, h = _place(first + lane, q)
                mean[b, t, h, d] = average[lane]
                if beta.size:
                    # Rounding may put F below the mean; a row that sees nothing has neither.
                    if total[lane] == 0:
                        free[b, t, h, d] = 0.0
                    elif partial[lane] < average[lane] or np.isnan(average[lane]):
                        free[b, t, h, d] = average[lane]
                    else:
                        free[b, t, h, d] = partial[lane]
    for lane in range(lanes):
        b, h = _place(first + lane, q)
        again[b, h] = lowest[lane] < -NATS


@kernel
def backward(  # type: ignore[no-untyped-def]
    to_mean, to_free, q, k, v, beta, segments_q, segments_k, causal, scale, mean, log_z, d_q, d_k, d_v, d_beta
):
    """Gradients of q, of k and v for each head [B, S, H, .], and of beta for each sequence and head [B, H, D]."""
    for task in prange(-(-q.shape[0] * q.shape[2] // LANES)):
        _backward(
            task * LANES, to_mean, to_free, q, k, v, beta, segments_q, segments_k, causal, scale, mean, log_z,
            d_q, d_k, d_v, d_beta,
        )  # fmt: skip


@job
def _backward(  # type: ignore[no-untyped-def]
    first, to_mean, to_free, q, k, v, beta, segments_q, segments_k, causal, scale, mean, log_z, d_q, d_k, d_v, d_beta
):
    length, keys, width, depth, lanes = q.shape[1], k.shape[1], q.shape[3], v.shape[3], _lanes(first, q)
    kt, vt, inverse = _loaded(first, lanes, q, k, v, beta)
    top, et = np.empty((depth, LANES)), np.empty((keys if beta.size else 0, depth, LANES))
    if beta.size:
        _exponentials(vt, inverse, top, et)
    query, p = np.empty((width, LANES), dtype=f32), np.empty((keys, LANES), dtype=f32)
    slope, highest = np.empty((keys, LANES)), np.empty(LANES, dtype=f32)
    dk, dv = np.zeros((keys, width, LANES), dtype=f32), np.zeros((keys, depth, LANES))
    # Of one channel: gradient and value of the mean, gradient of F (and by beta), F, what scales its exponentials.
    g_mean, mu, g_free = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    f, factor, share, total = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES), np.empty(LANES)
    dbeta, dq = np.zeros((depth, LANES)), np.empty((width, LANES), dtype=f32)
    for t in range(length):
        n = keys - length + t + 1 if causal else keys
        _scores(first, lanes, t, q, kt, segments_q, segments_k, scale, n, query, p, highest)
        for lane in range(lanes):
            b, h = _place(first + lane, q)
            # A row that sees nothing has scores of -inf, and so no weights.
            highest[lane] = log_z[b, t, h]
        _weigh(p, highest, n, total)
        slope[:n] = 0.0
        for d in range(depth):
            for lane in range(lanes):
                b, h = _place(first + lane, q)
                g_mean[lane], mu[lane] = to_mean[b, t, h, d], mean[b, t, h, d]
                if beta.size:
                    g_free[lane] = to_free[b, t, h, d]
            _through_mean(p, vt, d, n, g_mean, mu, slope, dv)
            if not beta.size:
                continue
            # F again, with the digits that its float32 lost: exp(beta F) is what the posterior is divided by.
            _sum(p, et, d, n, total, factor)
            for lane in range(f.size):
                f[lane] = top[d, lane] + log(_normal(factor[lane])) / inverse[d, lane]
                factor[lane] = 1.0 / _normal(factor[lane])
                share[lane] = g_free[lane] / inverse[d, lane]
            _through_free(p, vt, et, d, n, g_free, share, f, factor, slope, dv, dbeta[d])
        _to_scores(p, slope, kt, query, scale, n, dq, dk)
        for lane in range(lanes):
            b, h = _place(first + lane, q)
            for e in range(width):
                d_q[b, t, h, e] = dq[e, lane]
    for lane in range(lanes):
        b, h = _place(first + lane, q)
        for i in range(keys):
            for e in range(width):
                d_k[b, i, h, e] = dk[i, e, lane]
            for d in range(depth):
                d_v[b, i, h, d] = dv[i, d, lane]
        if beta.size:
            for d in range(depth):
                d_beta[b, h, d] = dbeta[d, lane] / inverse[d, lane]


@job
def _lanes(first, q):  # type: ignore[no-untyped-def]
    return min(LANES, q.shape[0] * q.shape[2] - first)


@job
def _place(index, q):  # type: ignore[no-untyped-def]
    return index // q.shape[2], index % q.shape[2]


@job
def _loaded(first, lanes, q, k, v, beta):  # type: ignore[no-untyped-def]
    """Keys [S, E, lanes], values [S, D, lanes] and beta [D, lanes]; lanes without a sequence hold zeros and ones."""
    repeats = q.shape[2] // k.shape[2]
    kt = np.zeros((k.shape[1], k.shape[3], LANES), dtype=f32)
    vt, inverse = np.zeros((v.shape[1], v.shape[3], LANES)), np.ones((v.shape[3], LANES))
    for lane in range(lanes):
        b, h = _place(first + lane, q)
        g = h // repeats
        for i in range(k.shape[1]):
            for e in range(k.shape[3]):
                kt[i, e, lane] = k[b, i, g, e]
            for d in range(v.shape[3]):
                vt[i, d, lane] = v[b, i, g, d]
        if beta.size:
            for d in range(v.shape[3]):
                inverse[d, lane] = beta[g, d]
    return kt, vt, inverse


@job
def _exponentials(vt, inverse, top, et):  # type: ignore[no-untyped-def]
    """et = exp(beta (v - top)) with each channel's largest value.

    Hidden keys count: any top is right that is not below the visible values, and theirs are not summed.
    """
    bottom = np.empty(LANES)
    for d in range(vt.shape[1]):
        for lane in range(bottom.size):
            top[d, lane] = bottom[lane] = vt[0, d, lane]
        for i in range(1, vt.shape[0]):
            for lane in range(bottom.size):
                top[d, lane] = max(top[d, lane], vt[i, d, lane])
                bottom[lane] = min(bottom[lane], vt[i, d, lane])
        exact = False
        for lane in range(bottom.size):
            exact = exact or top[d, lane] - bottom[lane] > RANGE
        for i in range(vt.shape[0]):
            if exact:
                for lane in range(bottom.size):
                    et[i, d, lane] = math.exp(inverse[d, lane] * (vt[i, d, lane] - top[d, lane]))
            else:
                for lane in range(bottom.size):
                    et[i, d, lane] = exp(f32(inverse[d, lane] * (vt[i, d, lane] - top[d, lane])))


@job
def _scores(first, lanes, t, q, kt, segments_q, segments_k, scale, n, query, s, highest):  # type: ignore[no-untyped-def]
    """s = scale <q_t, k_i>, -inf where the key is not seen, and the highest of them (0 where none is seen)."""
    query[:] = f32(0.0)
    for lane in range(lanes):
        b, h = _place(first + lane, q)
        for e in range(q.shape[3]):
            query[e, lane] = q[b, t, h, e] * f32(scale)
    fours = kt.shape[1] - kt.shape[1] % 4
    for i in range(n):
        for lane in range(highest.size):
            s[i, lane] = f32(0.0)
        for e in range(0, fours, 4):
            for lane in range(highest.size):
                low = query[e, lane] * kt[i, e, lane] + query[e + 1, lane] * kt[i, e + 1, lane]
                high = query[e + 2, lane] * kt[i, e + 2, lane] + query[e + 3, lane] * kt[i, e + 3, lane]
                s[i, lane] += low + high
        for e in range(fours, kt.shape[1]):
            for lane in range(highest.size):
                s[i, lane] += query[e, lane] * kt[i, e, lane]
    if segments_q.size:
        for lane in range(lanes):
            b = (first + lane) // q.shape[2]
            for i in range(n):
                if segments_q[b, t] < 0 or segments_k[b, i] != segments_q[b, t]:
                    s[i, lane] = -np.inf
    for lane in range(highest.size):
        highest[lane] = s[0, lane]
    for i in range(1, n):
        for lane in range(highest.size):
            highest[lane] = max(highest[lane], s[i, lane])
    for lane in range(highest.size):
        if highest[lane] == -np.inf:
            highest[lane] = f32(0.0)


@job
def _weigh(s, highest, n, total):  # type: ignore[no-untyped-def]
    """exp(s - highest) in place, and the sums."""
    total[:] = 0.0
    for i in range(n):
        for lane in range(highest.size):
            s[i, lane] = exp32(s[i, lane] - highest[lane])
        for lane in range(highest.size):
            total[lane] += s[i, lane]


@job
def _sum(s, x, d, n, total, out):  # type: ignore[no-untyped-def]
    """sum_i s_i x_i / total, of the channel d; 0 where nothing is seen."""
    out[:] = 0.0
    for i in range(n):
        for lane in range(total.size):
            out[lane] += s[i, lane] * x[i, d, lane]
    for lane in range(total.size):
        out[lane] = out[lane] / total[lane] if total[lane] != 0 else 0.0


@job
def _logarithm(top, beta, total, partial, lowest):  # type: ignore[no-untyped-def]
    """top + log(partial) / beta in place; lowest: the least logarithm so far where something is seen."""
    for lane in range(top.size):
        nats = log(_normal(partial[lane]))
        lowest[lane] = min(lowest[lane], nats if total[lane] != 0 else 0.0)
        partial[lane] = top[lane] + nats / beta[lane]


@inline
def _normal(x):  # type: ignore[no-untyped-def]
    """x, but not so small that it has no logarithm."""
    return 1e-300 if x < 1e-300 else x


@job
def _through_mean(p, vt, d, n, g_mean, mu, slope, dv):  # type: ignore[no-untyped-def]
    """mu = sum_i p_i v_i: d mu / d score_i = p_i (v_i - mu), of which p_i comes at the end."""
    for i in range(n):
        for lane in range(mu.size):
            slope[i, lane] += g_mean[lane] * (vt[i, d, lane] - mu[lane])
            dv[i, d, lane] += p[i, lane] * g_mean[lane]


@job
def _through_free(p, vt, et, d, n, g_free, share, f, factor, slope, dv, dbeta):  # type: ignore[no-untyped-def]
    """With the posterior q_i = p_i exp(beta (v_i - F)): dF/dscore_i = (q_i - p_i) / beta, dF/dv_i = q_i,
    dF/dbeta = sum_i q_i (v_i - F) / beta, which is divided at the end. share: g_free / beta."""
    for i in range(n):
        for lane in range(f.size):
            ratio = et[i, d, lane] * factor[lane]
            posterior = p[i, lane] * ratio * g_free[lane]
            slope[i, lane] += share[lane] * (ratio - 1.0)
            dv[i, d, lane] += posterior
            dbeta[lane] += posterior * (vt[i, d, lane] - f[lane])


@job
def _to_scores(p, slope, kt, query, scale, n, dq, dk):  # type: ignore[no-untyped-def]
    """From the scores to q and k; `query` already has the scale."""
    for i in range(n):
        for lane in range(slope.shape[1]):
            p[i, lane] = f32(p[i, lane] * slope[i, lane])
    fours = n - n % 4
    for e in range(kt.shape[1]):
        for lane in range(slope.shape[1]):
            dq[e, lane] = f32(0.0)
        for i in range(0, fours, 4):
            for lane in range(slope.shape[1]):
                low = p[i, lane] * kt[i, e, lane] + p[i + 1, lane] * kt[i + 1, e, lane]
                high = p[i + 2, lane] * kt[i + 2, e, lane] + p[i + 3, lane] * kt[i + 3, e, lane]
                dq[e, lane] += low + high
        for i in range(fours, n):
            for lane in range(slope.shape[1]):
                dq[e, lane] += p[i, lane] * kt[i, e, lane]
        for lane in range(slope.shape[1]):
            dq[e, lane] *= f32(scale)
    for i in range(n):
        for e in range(kt.shape[1]):
            for lane in range(slope.shape[1]):
                dk[i, e, lane] += p[i, lane] * query[e, lane]
