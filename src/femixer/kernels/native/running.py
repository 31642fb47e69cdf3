"""Compiled kernels of `femixer.kernels.running`: running mean and free energy per channel, in log space.

Arrays: key, gate, v, mean, free, log_total [B, T, C]; beta [C]; marks [B, T] int8 (see femixer.layout); state [3, B, C]
float64: log total, mean, free energy. Empty arrays stand for nothing: keys or gates of zero, no marks, the mean only.
Loops over channels are short and touch few arrays each, so that the compiler vectorises them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.native.primitives import exp, job, kernel, log
from femixer.layout import PADDING, START

# Below this share of the sum a term is kept as a logarithm only.
TINY = 1e-290
LANES = 128  # channels that one thread works on at a time


@kernel
def forward(key, gate, v, beta, marks, state, mean, free, log_total, last):  # type: ignore[no-untyped-def]
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _forward(index // blocks, index % blocks * LANES, key, gate, v, beta, marks, state, mean, free, log_total, last)


@job
def _forward(b, low, key, gate, v, beta, marks, state, mean, free, log_total, last):  # type: ignore[no-untyped-def]
    length, n = v.shape[1], min(LANES, v.shape[2] - low)
    # The sums z (of 1) and s (of v) are relative to exp(top); free energies go on from row to row.
    top, z, s, f = np.full(LANES, -math.inf), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    k, g, w, c = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    before, total = np.full(LANES, -math.inf), np.full(LANES, -math.inf)
    for i in range(n):
        total[i] = state[0, b, low + i]
        if total[i] > -math.inf:
            top[i], z[i], s[i], f[i] = total[i], 1.0, state[1, b, low + i], state[2, b, low + i]
    for t in range(length):
        if marks.size:
            if marks[b, t] == PADDING:
                for i in range(n):
                    mean[b, t, low + i] = 0.0
                    log_total[b, t, low + i] = 0.0
                    if beta.size:
                        free[b, t, low + i] = 0.0
                continue
            if marks[b, t] == START:
                top[:], total[:], z[:], s[:] = -math.inf, -math.inf, 0.0, 0.0
        x = v[b, t]
        if key.size:
            for i in range(n):
                k[i] = key[b, t, low + i]
        if gate.size:
            for i in range(n):
                g[i] = gate[b, t, low + i]
        for i in range(n):
            old = top[i] + g[i]
            rise = k[i] - old
            factor = exp(v.dtype.type(-abs(rise)))
            keep = factor if rise > 0 else 1.0
            add = 1.0 if rise > 0 else factor
            top[i] = max(old, k[i])
            c[i], w[i] = z[i] * keep, add
            z[i] = c[i] + add
            s[i] = s[i] * keep + add * x[low + i]
        out = mean[b, t]
        for i in range(n):
            inverse = 1.0 / z[i]
            out[low + i] = s[i] * inverse
            w[i] *= inverse
            c[i] *= inverse
        for i in range(n):
            before[i] = total[i] + g[i]
            total[i] = top[i] + log(z[i])
        out = log_total[b, t]
        for i in range(n):
            out[low + i] = total[i]
        if beta.size:
            # With w and c = 1 - w the shares of this token and of the past, and relative to the larger of F' and v:
            # exp(beta F) = c exp(beta F') + w exp(beta v).
            for i in range(n):
                value = np.float64(x[low + i])
                last_free = f[i] if c[i] > 0.0 else value
                rise = value - last_free
                factor = exp(v.dtype.type(-abs(beta[low + i] * rise)))
                share = w[i] + c[i] * factor if rise > 0 else max(c[i], TINY) + w[i] * factor
                f[i] = max(last_free, value) + log(min(share, 1.0)) / beta[low + i] if c[i] > TINY else f[i]
            for i in range(n):
                if c[i] <= TINY:
                    # A past of a weight too small for a product can still have the largest term.
                    new = beta[low + i] * np.float64(x[low + i]) + k[i] - total[i]
                    old = beta[low + i] * f[i] + before[i] - total[i] if before[i] > -math.inf else -math.inf
                    f[i] = (max(old, new) + math.log1p(math.exp(-abs(new - old)))) / beta[low + i]
            out = free[b, t]
            for i in range(n):
                out[low + i] = max(f[i], s[i] / z[i])
    for i in range(n):
        last[0, b, low + i] = total[i]
        if z[i] > 0:
            last[1, b, low + i], last[2, b, low + i] = s[i] / z[i], f[i]


@kernel
def backward(  # type: ignore[no-untyped-def]
    key, gate, v, beta, marks, state, mean, free, log_total,
    to_mean, to_free, to_log, to_last, d_key, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _backward(
            index // blocks, index % blocks * LANES, key, gate, v, beta, marks, state, mean, free, log_total,
            to_mean, to_free, to_log, to_last, d_key, d_gate, d_v, d_beta, d_state,
        )  # fmt: skip


@job
def _backward(  # type: ignore[no-untyped-def]
    b, low, key, gate, v, beta, marks, state, mean, free, log_total,
    to_mean, to_free, to_log, to_last, d_key, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    """With w and c = 1 - w the shares of the newest token and of the past in the prior, r and o those in the posterior:

    mean = c mean' + w v,   d log total = c d(log total' + gate) + w d key,   dF = o dF' + r dv + (r - w) dx / beta

    with x = key - gate - log total' the log odds of w; a prime marks the row before.
    """
    length, n = v.shape[1], min(LANES, v.shape[2] - low)
    at_log, at_mean, at_free = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    total0, mean0, free0 = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    odds, to_odds, w, c = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    r, o, grad = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    beta_sum = np.zeros(LANES)
    for i in range(n):
        at_log[i], at_mean[i] = to_last[0, b, low + i], to_last[1, b, low + i]
        if beta.size:
            at_free[i] = to_last[2, b, low + i]
    for u in range(length):
        t = length - 1 - u
        if marks.size and marks[b, t] == PADDING:
            for i in range(n):
                d_v[b, t, low + i] = 0.0
                if key.size:
                    d_key[b, t, low + i] = 0.0
                if gate.size:
                    d_gate[b, t, low + i] = 0.0
            continue
        before = t - 1
        if marks.size:
            while before >= 0 and marks[b, before] == PADDING:
                before -= 1
        if marks.size and marks[b, t] == START:
            total0[:], mean0[:], free0[:] = -math.inf, 0.0, 0.0
        elif before < 0:
            for i in range(n):
                total0[i], mean0[i] = state[0, b, low + i], state[1, b, low + i]
                if beta.size:
                    free0[i] = state[2, b, low + i]
        else:
            for i in range(n):
                total0[i] = log_total[b, before, low + i]
            for i in range(n):
                mean0[i] = mean[b, before, low + i]
            if beta.size:
                for i in range(n):
                    free0[i] = free[b, before, low + i]
        for i in range(n):
            odds[i] = -total0[i]
        if key.size:
            for i in range(n):
                odds[i] += key[b, t, low + i]
        if gate.size:
            for i in range(n):
                odds[i] -= gate[b, t, low + i]
        for i in range(n):
            factor = exp(v.dtype.type(-abs(odds[i])))
            inverse = 1.0 / (1.0 + factor)
            w[i] = inverse if odds[i] > 0 else factor * inverse
            c[i] = factor * inverse if odds[i] > 0 else inverse
        for i in range(n):
            at_mean[i] += to_mean[b, t, low + i]
        for i in range(n):
            at_log[i] += to_log[b, t, low + i]
        x = v[b, t]
        for i in range(n):
            to_odds[i] = at_mean[i] * w[i] * c[i] * (x[low + i] - mean0[i])
            grad[i] = w[i] * at_mean[i]
        if beta.size:
            for i in range(n):
                log_odds = odds[i] + beta[low + i] * (x[low + i] - free0[i])
                factor = exp(v.dtype.type(-abs(log_odds)))
                inverse = 1.0 / (1.0 + factor)
                r[i] = inverse if log_odds > 0 else factor * inverse
                o[i] = factor * inverse if log_odds > 0 else inverse
            f = free[b, t]
            for i in range(n):
                at_free[i] += to_free[b, t, low + i]
            for i in range(n):
                cold = at_free[i] / beta[low + i]
                to_odds[i] += cold * (r[i] - w[i])
                grad[i] += r[i] * at_free[i]
                beta_sum[i] += cold * (r[i] * (x[low + i] - f[low + i]) + o[i] * (free0[i] - f[low + i]))
                at_free[i] *= o[i]
        out = d_v[b, t]
        for i in range(n):
            out[low + i] = grad[i]
        if key.size:
            out = d_key[b, t]
            for i in range(n):
                out[low + i] = w[i] * at_log[i] + to_odds[i]
        for i in range(n):
            at_mean[i] *= c[i]
            at_log[i] = c[i] * at_log[i] - to_odds[i]
        if gate.size:
            out = d_gate[b, t]
            for i in range(n):
                out[low + i] = at_log[i]
    for i in range(n):
        d_state[0, b, low + i], d_state[1, b, low + i] = at_log[i], at_mean[i]
        if beta.size:
            d_state[2, b, low + i], d_beta[b, low + i] = at_free[i], beta_sum[i]
