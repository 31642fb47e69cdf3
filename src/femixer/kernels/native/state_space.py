"""Compiled kernels of `femixer.kernels.state_space`: diagonal state spaces with N modes per channel, in float64.

Per channel the state holds N decayed sums of the streams 1, v and exp(beta v - top), where top follows the largest
exponent as it decays with the slowest of the modes, so that nothing over- or underflows, whatever the values.

Arrays: rate [N, C] log decays per unit of step; step [B, T, C] (empty: 1); write [B, T, N] (empty: 1); read [B, T, N]
or weight [N, C] (the other is empty); skip [C] (empty: a token is read through the state; given: it is read with this
weight instead); v [B, T, C]; beta [C]; marks [B, T]; state [B, 3, N, C], top [B, C] float64; mean, free, log_total
[B, T, C]. Empty arrays stand for nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.native.primitives import dot, exp, job, kernel, log
from femixer.layout import PADDING, START

LANES = 64  # channels that one thread works on at a time
# A sum of exponentials below this is beyond sight; the free energy is then the mean.
TINY = 1e-290


@job
def _coefficients(rate, slow, step, v, beta, top, t, b, low, n, a, fade, x):  # type: ignore[no-untyped-def]
    """Of token t: the decays a [2, N, lanes] of the streams 1 and v, and of the exponentials (times fade, the change of
    top); the streams x [3, lanes]."""
    for i in range(n):
        x[0, i] = 1.0
        x[1, i] = v[b, t, low + i]
    slowest = a[0, 0]  # overwritten below, last
    if step.size:
        for i in range(n):
            slowest[i] = step[b, t, low + i] * slow[i]
    else:
        for i in range(n):
            slowest[i] = slow[i]
    if beta.size:
        for i in range(n):
            new, old = beta[low + i] * x[1, i], top[i] + slowest[i]
            top[i] = max(old, new)
            fade[i] = exp(v.dtype.type(old - top[i]))
            x[2, i] = exp(v.dtype.type(new - top[i]))
    for m in range(rate.shape[0]):
        row, relative = rate[m], a[1, m]
        if step.size:
            for i in range(n):
                relative[i] = exp(v.dtype.type(step[b, t, low + i] * (row[low + i] - slow[i])))
        else:
            for i in range(n):
                relative[i] = exp(v.dtype.type(row[low + i] - slow[i]))
    for i in range(n):
        slowest[i] = exp(v.dtype.type(slowest[i]))
    for u in range(rate.shape[0]):
        m = rate.shape[0] - 1 - u
        plain, relative = a[0, m], a[1, m]
        for i in range(n):
            plain[i] = relative[i] * slowest[i]


@job
def _decay(s, a, fade, n, streams):  # type: ignore[no-untyped-def]
    for m in range(s.shape[1]):
        one, mean, plain = s[0, m], s[1, m], a[0, m]
        for i in range(n):
            one[i] *= plain[i]
            mean[i] *= plain[i]
        if streams == 3:
            free, relative = s[2, m], a[1, m]
            for i in range(n):
                free[i] *= relative[i] * fade[i]


@job
def _write(s, x, step, write, t, b, low, n, streams):  # type: ignore[no-untyped-def]
    for m in range(s.shape[1]):
        amount = np.float64(write[b, t, m]) if write.size else 1.0
        for j in range(streams):
            row, stream = s[j, m], x[j]
            if step.size:
                for i in range(n):
                    row[i] += amount * step[b, t, low + i] * stream[i]
            else:
                for i in range(n):
                    row[i] += amount * stream[i]


@job
def _sums(s, read, weight, t, b, low, n, streams, y):  # type: ignore[no-untyped-def]
    """y [3, lanes] = sum over the modes of their weight times s."""
    for j in range(streams):
        out = y[j]
        for i in range(n):
            out[i] = 0.0
        for m in range(s.shape[1]):
            row = s[j, m]
            if read.size:
                amount = np.float64(read[b, t, m])
                for i in range(n):
                    out[i] += amount * row[i]
            else:
                factor = weight[m]
                for i in range(n):
                    out[i] += factor[low + i] * row[i]


@job
def _load(state, top, rate, b, low, n, s, shift, slow):  # type: ignore[no-untyped-def]
    for m in range(rate.shape[0]):
        for j in range(3):
            for i in range(n):
                s[j, m, i] = state[b, j, m, low + i]
    for i in range(n):
        shift[i] = top[b, low + i]
        slow[i] = -math.inf
        for m in range(rate.shape[0]):
            slow[i] = max(slow[i], np.float64(rate[m, low + i]))


@job
def _reset(s, shift):  # type: ignore[no-untyped-def]
    s[:] = 0.0
    shift[:] = -math.inf


@kernel
def forward(  # type: ignore[no-untyped-def]
    rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive,
    mean, free, log_total, last, last_top,
):  # fmt: skip
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _forward(
            index // blocks, index % blocks * LANES, rate, step, write, read, weight, skip, v, beta, marks, state, top,
            exclusive, mean, free, log_total, last, last_top,
        )  # fmt: skip


@job
def _forward(  # type: ignore[no-untyped-def]
    b, low, rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive,
    mean, free, log_total, last, last_top,
):  # fmt: skip
    length, n, modes = v.shape[1], min(LANES, v.shape[2] - low), rate.shape[0]
    streams = 3 if beta.size else 2
    s, shift, slow = np.zeros((3, modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    a, fade, x, y = np.zeros((2, modes, LANES)), np.zeros(LANES), np.zeros((3, LANES)), np.zeros((3, LANES))
    _load(state, top, rate, b, low, n, s, shift, slow)
    for t in range(length):
        if marks.size and marks[b, t] == PADDING:
            mean[b, t, low : low + n] = 0.0
            log_total[b, t, low : low + n] = 0.0
            if beta.size:
                free[b, t, low : low + n] = 0.0
            continue
        if marks.size and marks[b, t] == START:
            _reset(s, shift)
        _coefficients(rate, slow, step, v, beta, shift, t, b, low, n, a, fade, x)
        _decay(s, a, fade, n, streams)
        if skip.size or exclusive:
            _sums(s, read, weight, t, b, low, n, streams, y)
        if skip.size and not exclusive:
            for j in range(streams):
                for i in range(n):
                    y[j, i] += skip[low + i] * x[j, i]
        _write(s, x, step, write, t, b, low, n, streams)
        if not skip.size and not exclusive:
            _sums(s, read, weight, t, b, low, n, streams, y)
        out = mean[b, t]
        for i in range(n):
            out[low + i] = y[1, i] / y[0, i] if y[0, i] > 0.0 else 0.0
        out = log_total[b, t]
        for i in range(n):
            out[low + i] = log(max(y[0, i], TINY)) if y[0, i] > 0.0 else -math.inf
        if beta.size:
            out = free[b, t]
            for i in range(n):
                total = y[0, i] if y[0, i] > 0.0 else 1.0
                ratio, average = y[2, i] / total, y[1, i] / total
                value = (shift[i] + log(max(ratio, TINY))) / beta[low + i]
                out[low + i] = max(value, average) if ratio > TINY else average
    for m in range(modes):
        for j in range(3):
            for i in range(n):
                last[b, j, m, low + i] = s[j, m, i]
    for i in range(n):
        last_top[b, low + i] = shift[i]


@kernel
def backward(  # type: ignore[no-untyped-def]
    rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive, to_mean, to_free, to_log, to_last,
    d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_state,
):  # fmt: skip
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _backward(
            index // blocks, index % blocks, rate, step, write, read, weight, skip, v, beta, marks, state, top,
            exclusive, to_mean, to_free, to_log, to_last,
            d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_state,
        )  # fmt: skip


@job
def _backward(  # type: ignore[no-untyped-def]
    b, block, rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive,
    to_mean, to_free, to_log, to_last, d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_state,
):  # fmt: skip
    """Forwards once to keep a state now and then; backwards from each of them, forwards again for the rows between.

    d_write and d_read [B, blocks, T, N] are this block's share of a sum over all channels.
    """
    low = block * LANES
    length, n, modes = v.shape[1], min(LANES, v.shape[2] - low), rate.shape[0]
    streams = 3 if beta.size else 2
    own = skip.size > 0 and not exclusive  # a token reads itself past the state
    late = skip.size == 0 and not exclusive  # rows read the state after the token was written
    s, shift, slow = np.zeros((3, modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    a, fade, x, y = np.zeros((2, modes, LANES)), np.zeros(LANES), np.zeros((3, LANES)), np.zeros((3, LANES))
    _load(state, top, rate, b, low, n, s, shift, slow)
    rows = max(16, int(math.sqrt(length)) // 2)
    chunks = (length + rows - 1) // rows
    kept, kept_top = np.empty((chunks, 3, modes, LANES)), np.empty((chunks, LANES))
    for t in range(length):
        if t % rows == 0:
            kept[t // rows], kept_top[t // rows] = s, shift
        if marks.size and marks[b, t] == PADDING:
            continue
        if marks.size and marks[b, t] == START:
            _reset(s, shift)
        _coefficients(rate, slow, step, v, beta, shift, t, b, low, n, a, fade, x)
        _decay(s, a, fade, n, streams)
        _write(s, x, step, write, t, b, low, n, streams)
    states, decays = np.empty((rows, 3, modes, LANES)), np.empty((rows, 2, modes, LANES))
    fades, xs, to_sums = np.empty((rows, LANES)), np.empty((rows, 3, LANES)), np.zeros((rows, 3, LANES))
    back = np.zeros((3, modes, LANES))
    for m in range(modes):
        for j in range(3):
            for i in range(n):
                back[j, m, i] = to_last[b, j, m, low + i]
    d_x, d_d, rate_sum = np.zeros((3, LANES)), np.zeros(LANES), np.zeros((modes, LANES))
    weight_sum, skip_sum, beta_sum, ones = np.zeros((modes, LANES)), np.zeros(LANES), np.zeros(LANES), np.ones(LANES)
    work = np.zeros(LANES)
    for chunk in range(chunks - 1, -1, -1):
        start, stop = chunk * rows, min((chunk + 1) * rows, length)
        s[:], shift[:] = kept[chunk], kept_top[chunk]
        for t in range(start, stop):
            if marks.size and marks[b, t] == PADDING:
                continue
            if marks.size and marks[b, t] == START:
                _reset(s, shift)
            at = t - start
            _coefficients(rate, slow, step, v, beta, shift, t, b, low, n, decays[at], fades[at], xs[at])
            _decay(s, decays[at], fades[at], n, streams)
            states[at] = s
            if not late:
                _sums(s, read, weight, t, b, low, n, streams, y)
            if own:
                for j in range(streams):
                    for i in range(n):
                        y[j, i] += skip[low + i] * xs[at, j, i]
            _write(s, xs[at], step, write, t, b, low, n, streams)
            if late:
                _sums(s, read, weight, t, b, low, n, streams, y)
            grad = to_sums[at]
            for i in range(n):
                there = y[0, i] > 0.0
                total = y[0, i] if there else 1.0
                to_m = np.float64(to_mean[b, t, low + i]) if there else 0.0
                common = np.float64(to_log[b, t, low + i]) if there else 0.0
                average = y[1, i] / total
                if beta.size:
                    to_f = np.float64(to_free[b, t, low + i]) if there else 0.0
                    ratio, warm = y[2, i] / total, np.float64(beta[low + i])
                    value = (shift[i] + log(max(ratio, TINY))) / warm
                    free = ratio > TINY and value > average
                    slope = to_f / warm if free else 0.0
                    grad[2, i] = slope / y[2, i] if free else 0.0
                    common -= slope
                    beta_sum[i] -= slope * value if free else 0.0
                    to_m += 0.0 if free else to_f
                grad[1, i] = to_m / total
                grad[0, i] = (common - to_m * average) / total
        for t in range(stop - 1, start - 1, -1):
            at = t - start
            if marks.size and marks[b, t] == PADDING:
                d_v[b, t, low : low + n] = 0.0
                if step.size:
                    d_step[b, t, low : low + n] = 0.0
                if write.size:
                    d_write[b, block, t] = 0.0
                if read.size:
                    d_read[b, block, t] = 0.0
                continue
            grad, x, old = to_sums[at], xs[at], states[at]
            d_x[:] = 0.0
            d_d[:] = 0.0
            for m in range(modes):
                amount = np.float64(write[b, t, m]) if write.size else 1.0
                query = np.float64(read[b, t, m]) if read.size else 0.0
                read_sum = 0.0
                for j in range(streams):
                    row, stream, to_y, before = back[j, m], x[j], grad[j], old[j, m]
                    if late:
                        # The row reads the state with the token in it.
                        if step.size:
                            for i in range(n):
                                work[i] = before[i] + amount * step[b, t, low + i] * stream[i]
                        else:
                            for i in range(n):
                                work[i] = before[i] + amount * stream[i]
                        if read.size:
                            read_sum += dot(work, to_y, n)
                            for i in range(n):
                                row[i] += query * to_y[i]
                        else:
                            for i in range(n):
                                weight_sum[m, i] += work[i] * to_y[i]
                                row[i] += weight[m, low + i] * to_y[i]
                    # The token's own writing.
                    for i in range(n):
                        d_x[j, i] += amount * row[i]
                    for i in range(n):
                        work[i] = row[i] * stream[i]
                    if write.size:
                        scale = dot(work, step[b, t, low : low + n], n) if step.size else dot(work, ones, n)
                        d_write[b, block, t, m] = scale if j == 0 else d_write[b, block, t, m] + scale
                    for i in range(n):
                        d_d[i] += amount * work[i]
                    if not late:
                        if read.size:
                            read_sum += dot(before, to_y, n)
                            for i in range(n):
                                row[i] += query * to_y[i]
                        else:
                            for i in range(n):
                                weight_sum[m, i] += before[i] * to_y[i]
                                row[i] += weight[m, low + i] * to_y[i]
                    # The decay: of its logarithm, rate times step.
                    for i in range(n):
                        work[i] = row[i] * before[i]
                    if step.size:
                        for i in range(n):
                            rate_sum[m, i] += work[i] * step[b, t, low + i]
                        for i in range(n):
                            d_d[i] += work[i] * rate[m, low + i]
                    else:
                        for i in range(n):
                            rate_sum[m, i] += work[i]
                if read.size:
                    d_read[b, block, t, m] = read_sum
            if step.size:
                for j in range(streams):
                    for i in range(n):
                        d_x[j, i] *= step[b, t, low + i]
                for i in range(n):
                    d_step[b, t, low + i] = d_d[i]
            if own:
                for j in range(streams):
                    for i in range(n):
                        d_x[j, i] += skip[low + i] * grad[j, i]
                        skip_sum[i] += x[j, i] * grad[j, i]
            for i in range(n):
                gradient = d_x[1, i]
                if beta.size:
                    weighted = x[2, i] * d_x[2, i]
                    gradient += beta[low + i] * weighted
                    beta_sum[i] += x[1, i] * weighted
                d_v[b, t, low + i] = gradient
            if marks.size and marks[b, t] == START:
                back[:] = 0.0
            else:
                _decay(back, decays[at], fades[at], n, streams)
    for i in range(n):
        for m in range(modes):
            d_rate[b, m, low + i] = rate_sum[m, i]
            for j in range(3):
                d_state[b, j, m, low + i] = back[j, m, i]
            if weight.size:
                d_weight[b, m, low + i] = weight_sum[m, i]
        if skip.size:
            d_skip[b, low + i] = skip_sum[i]
        if beta.size:
            d_beta[b, low + i] = beta_sum[i]
