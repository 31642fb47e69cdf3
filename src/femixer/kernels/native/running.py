"""Compiled kernels of `femixer.kernels.running`: running mean and free energy per channel, in log space.

Arrays: key, gate, v, mean, free, log_total [B, T, C]; beta [C]; marks [B, T] int8 (see femixer.layout); state [3, B, C]
float64: log total, mean, free energy. Empty arrays stand for nothing: keys or gates of zero, no marks, the mean only.
Loops over channels are short and touch few arrays each, so that the compiler vectorises them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.native.primitives import copy, exp, job, kernel, largest, log
from femixer.layout import PADDING, START

# Beyond these log odds a share is kept as a logarithm only: float32 exponentials end there.
DISTANT, TINY = 80.0, 1e-290
# Exponents above this would overflow float32.
FAR = 80.0
LANES = 128  # channels that one thread works on at a time
# Rows of the scratch array: what goes on from token to token, the token's own, and the temperatures.
TOTAL, MEAN, FREE, BEFORE, ODDS, FAR_ODDS, W, C, KEY, GATE, VALUE, WARM, COLD = range(13)


@kernel
def forward(key, gate, v, beta, marks, state, mean, free, log_total, last):  # type: ignore[no-untyped-def]
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _forward(index // blocks, index % blocks * LANES, key, gate, v, beta, marks, state, mean, free, log_total, last)


@job
def _forward(b, low, key, gate, v, beta, marks, state, mean, free, log_total, last):  # type: ignore[no-untyped-def]
    """With w and c = 1 - w the shares of a token and of its past, a prime marking the row before:

    log(w / c) = key - gate - log total',   mean = c mean' + w v,   exp(beta F) = c exp(beta F') + w exp(beta v)
    """
    length, n = v.shape[1], min(LANES, v.shape[2] - low)
    # One array, so that the compiler sees that its rows do not overlap.
    r = np.zeros((13, LANES))
    r[TOTAL] = -math.inf
    r[WARM] = 1.0
    for i in range(n):
        r[TOTAL, i], r[MEAN, i] = state[0, b, low + i], state[1, b, low + i]
        if beta.size:
            r[FREE, i], r[WARM, i] = state[2, b, low + i], beta[low + i]
    r[COLD] = 1.0 / r[WARM]
    for t in range(length):
        if marks.size:
            if marks[b, t] == PADDING:
                mean[b, t, low : low + n] = 0.0
                log_total[b, t, low : low + n] = 0.0
                if beta.size:
                    free[b, t, low : low + n] = 0.0
                continue
            if marks[b, t] == START:
                r[TOTAL], r[MEAN], r[FREE] = -math.inf, 0.0, 0.0
        copy(v[b, t, low : low + n], r[VALUE])
        if key.size:
            copy(key[b, t, low : low + n], r[KEY])
        if gate.size:
            copy(gate[b, t, low : low + n], r[GATE])
        _advance(r, v, beta.size > 0)
        if beta.size:
            if largest(r[FAR_ODDS]) > DISTANT:
                _far(r, n)
            for i in range(LANES):
                r[BEFORE, i] = max(r[FREE, i], r[MEAN, i])
            copy(r[BEFORE, :n], free[b, t, low : low + n])
        copy(r[MEAN, :n], mean[b, t, low : low + n])
        copy(r[TOTAL, :n], log_total[b, t, low : low + n])
    for i in range(n):
        last[0, b, low + i], last[1, b, low + i] = r[TOTAL, i], r[MEAN, i]
        if beta.size:
            last[2, b, low + i] = r[FREE, i]


@job
def _far(r, n):  # type: ignore[no-untyped-def]
    """A share too small for a product can still belong to the larger term."""
    for i in range(n):
        odds = r[ODDS, i]
        if r[FAR_ODDS, i] > DISTANT:
            new, old = r[WARM, i] * r[VALUE, i] + min(odds, 0.0), r[WARM, i] * r[BEFORE, i] - max(odds, 0.0)
            r[FREE, i] = (max(old, new) + math.log1p(math.exp(-abs(new - old)))) * r[COLD, i]


@job
def _advance(r, v, energies):  # type: ignore[no-untyped-def]
    """Go on by the token whose key, gate and value are in r. All lanes, also unused ones: a fixed number."""
    for i in range(LANES):
        # Whatever is loaded is loaded first: a load inside a condition could not be vectorised.
        value, key, old = r[VALUE, i], r[KEY, i], r[TOTAL, i] + r[GATE, i]
        odds = key - old
        factor = exp(v.dtype.type(-abs(odds)))
        inverse = 1.0 / (1.0 + factor)
        newer, rest = inverse, factor * inverse
        w = newer if odds > 0 else rest
        c = rest if odds > 0 else newer
        r[TOTAL, i] = max(old, key) + log(1.0 + factor)
        r[MEAN, i] = c * r[MEAN, i] + w * value
        r[ODDS, i] = odds
        r[FAR_ODDS, i] = abs(odds) if old > -math.inf else 0.0
        r[W, i] = w
        r[C, i] = c
    if not energies:
        return
    for i in range(LANES):
        value, before, w, c = r[VALUE, i], r[FREE, i], r[W, i], r[C, i]
        rise = r[WARM, i] * (value - before)
        ahead = r[ODDS, i] + rise
        # Relative to the larger of the two terms. The other one's exponent is large only where its share is small, and
        # is then taken from the odds.
        base = w if ahead > 0 else c
        other = c if ahead > 0 else w
        exponent = -rise if ahead > 0 else rise
        from_odds = -abs(ahead)
        amount = base if exponent > FAR else other
        exponent = from_odds if exponent > FAR else exponent
        reference = value if ahead > 0 else before
        r[BEFORE, i] = before
        r[FREE, i] = reference + r[COLD, i] * log(max(base + amount * exp(v.dtype.type(exponent)), TINY))


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
