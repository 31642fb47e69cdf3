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

from femixer.kernels.native.primitives import copy, dot, exp, job, kernel, log
from femixer.layout import PADDING, START

LANES = 64  # channels that one thread works on at a time
# Below this a total is nothing, and a sum of exponentials beyond sight; the free energy is then the mean.
TINY = 1e-290
NEAR = 40.0


@job
def _coefficients(rate, slow, d, x, warm, top, a, fade, common, single, energies, modes):  # type: ignore[no-untyped-def]
    """Of a token with steps d and values x[1]: the decays a [2, N, lanes] of the streams 1 and v, and of exponentials
    (times fade, the change of top); the exponential x[2]. All lanes, also unused ones: a fixed number. modes: False
    where a holds the decays already, which without steps are those of every token."""
    for i in range(LANES):
        common[i] = exp(single.dtype.type(d[i] * slow[i]))
    if energies:
        for i in range(LANES):
            before = top[i]
            new, old = warm[i] * x[1, i], before + d[i] * slow[i]
            highest = max(old, new)
            fall, rest = before - highest, old - highest
            # The same rounded decay as the other streams have, wherever that does not overflow: in a narrow channel
            # only then the errors of the sums cancel.
            near = fall < NEAR
            factor = common[i] if near else 1.0
            top[i] = highest
            fade[i] = factor * exp(single.dtype.type(fall if near else rest))
            x[2, i] = exp(single.dtype.type(new - highest))
    for m in range(rate.shape[0] if modes else 0):
        for i in range(LANES):
            factor = exp(single.dtype.type(d[i] * (rate[m, i] - slow[i])))
            a[1, m, i] = factor
            a[0, m, i] = factor * common[i]


# Rows of larger arrays are indexed in place: taking a row as an array of its own costs as much as working on it.


@job
def _decay(s, a, fade, streams):  # type: ignore[no-untyped-def]
    for m in range(s.shape[1]):
        for i in range(LANES):
            s[0, m, i] *= a[0, m, i]
            s[1, m, i] *= a[0, m, i]
        if streams == 3:
            for i in range(LANES):
                s[2, m, i] *= a[1, m, i] * fade[i]


@job
def _write(s, x, d, write, streams):  # type: ignore[no-untyped-def]
    """Add write[m] d x to every mode; an empty `write` is 1."""
    for m in range(s.shape[1]):
        amount = np.float64(write[m]) if write.size else 1.0
        for j in range(streams):
            for i in range(LANES):
                s[j, m, i] += amount * d[i] * x[j, i]


@job
def _sums(s, read, weight, streams, y):  # type: ignore[no-untyped-def]
    """y [3, lanes] = sum over the modes of their weight times s."""
    for j in range(streams):
        for i in range(LANES):
            y[j, i] = 0.0
        for m in range(s.shape[1]):
            if read.size:
                amount = np.float64(read[m])
                for i in range(LANES):
                    y[j, i] += amount * s[j, m, i]
            else:
                for i in range(LANES):
                    y[j, i] += weight[m, i] * s[j, m, i]


@job
def _load(state, top, rate, weight, skip, beta, b, low, n, s, shift, slow, rates, weights, skips, warm):  # type: ignore[no-untyped-def]
    """The block's part of everything that does not change from token to token."""
    for m in range(rate.shape[0]):
        copy(rate[m, low : low + n], rates[m])
        if weight.size:
            copy(weight[m, low : low + n], weights[m])
        for j in range(3):
            copy(state[b, j, m, low : low + n], s[j, m])
    if skip.size:
        copy(skip[low : low + n], skips)
    if beta.size:
        copy(beta[low : low + n], warm)
    for i in range(n):
        shift[i] = top[b, low + i]
    slow[:] = rates[0]
    for m in range(rate.shape[0]):
        slow[:] = np.maximum(slow, rates[m])


@job
def _token(step, v, b, t, low, n, d, x):  # type: ignore[no-untyped-def]
    copy(v[b, t, low : low + n], x[1])
    if step.size:
        copy(step[b, t, low : low + n], d)


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
    streams, none = 3 if beta.size else 2, np.empty(0, v.dtype)
    s, shift, slow = np.zeros((3, modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    rates, weights = np.zeros((modes, LANES)), np.zeros((modes, LANES))
    skips, warm, d = np.zeros(LANES), np.ones(LANES), np.ones(LANES)
    a, fade, common = np.zeros((2, modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    x, y, out = np.ones((3, LANES)), np.zeros((3, LANES)), np.zeros(LANES)
    fresh = True
    _load(state, top, rate, weight, skip, beta, b, low, n, s, shift, slow, rates, weights, skips, warm)
    for t in range(length):
        if marks.size and marks[b, t] == PADDING:
            mean[b, t, low : low + n] = 0.0
            log_total[b, t, low : low + n] = 0.0
            if beta.size:
                free[b, t, low : low + n] = 0.0
            continue
        if marks.size and marks[b, t] == START:
            _reset(s, shift)
        query = read[b, t] if read.size else none
        _token(step, v, b, t, low, n, d, x)
        _coefficients(rates, slow, d, x, warm, shift, a, fade, common, v, beta.size > 0, fresh or step.size > 0)
        fresh = False
        _decay(s, a, fade, streams)
        if skip.size or exclusive:
            _sums(s, query, weights, streams, y)
        if skip.size and not exclusive:
            for j in range(streams):
                for i in range(LANES):
                    y[j, i] += skips[i] * x[j, i]
        _write(s, x, d, write[b, t] if write.size else none, streams)
        if not skip.size and not exclusive:
            _sums(s, query, weights, streams, y)
        for i in range(LANES):
            total = y[0, i]
            out[i] = y[1, i] / (total if total > TINY else 1.0)
        copy(out[:n], mean[b, t, low : low + n])
        if beta.size:
            for i in range(LANES):
                total, average = y[0, i], out[i]
                ratio = y[2, i] / (total if total > TINY else 1.0)
                value = max((shift[i] + log(max(ratio, TINY))) / warm[i], average)
                out[i] = value if ratio > TINY else average
            copy(out[:n], free[b, t, low : low + n])
        for i in range(LANES):
            total = y[0, i]
            value = log(max(total, TINY))
            out[i] = value if total > TINY else -math.inf
        copy(out[:n], log_total[b, t, low : low + n])
    for m in range(modes):
        for j in range(3):
            copy(s[j, m, :n], last[b, j, m, low : low + n])
    copy(shift[:n], last_top[b, low : low + n])


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
    streams, none = 3 if beta.size else 2, np.empty(0, v.dtype)
    own = skip.size > 0 and not exclusive  # a token reads itself past the state
    late = skip.size == 0 and not exclusive  # rows read the state after the token was written
    s, shift, slow = np.zeros((3, modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    rates, weights = np.zeros((modes, LANES)), np.zeros((modes, LANES))
    skips, warm, d = np.zeros(LANES), np.ones(LANES), np.ones(LANES)
    a, fade, common = np.zeros((2, modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    x, y = np.ones((3, LANES)), np.zeros((3, LANES))
    fresh = True
    _load(state, top, rate, weight, skip, beta, b, low, n, s, shift, slow, rates, weights, skips, warm)
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
        _token(step, v, b, t, low, n, d, x)
        _coefficients(rates, slow, d, x, warm, shift, a, fade, common, v, beta.size > 0, fresh or step.size > 0)
        fresh = False
        _decay(s, a, fade, streams)
        _write(s, x, d, write[b, t] if write.size else none, streams)
    # Without steps all rows have the same decays, which are in `a` by now.
    states, decays = np.empty((rows, 3, modes, LANES)), np.empty((rows if step.size else 1, 2, modes, LANES))
    decays[0] = a
    fades, xs, to_sums = np.empty((rows, LANES)), np.ones((rows, 3, LANES)), np.zeros((rows, 3, LANES))
    steps = np.ones((rows, LANES))
    back = np.zeros((3, modes, LANES))
    for m in range(modes):
        for j in range(3):
            copy(to_last[b, j, m, low : low + n], back[j, m])
    d_x, d_d, rate_sum = np.zeros((3, LANES)), np.zeros(LANES), np.zeros((modes, LANES))
    weight_sum, skip_sum, beta_sum = np.zeros((modes, LANES)), np.zeros(LANES), np.zeros(LANES)
    work, to_m, to_f, to_l = np.zeros((1, LANES)), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    for chunk in range(chunks - 1, -1, -1):
        start, stop = chunk * rows, min((chunk + 1) * rows, length)
        s[:], shift[:] = kept[chunk], kept_top[chunk]
        for t in range(start, stop):
            if marks.size and marks[b, t] == PADDING:
                continue
            if marks.size and marks[b, t] == START:
                _reset(s, shift)
            at = t - start
            query = read[b, t] if read.size else none
            _token(step, v, b, t, low, n, steps[at], xs[at])
            decay = decays[at if step.size else 0]
            _coefficients(
                rates, slow, steps[at], xs[at], warm, shift, decay, fades[at], common, v, beta.size > 0, step.size > 0
            )  # fmt: skip
            _decay(s, decay, fades[at], streams)
            states[at] = s
            if not late:
                _sums(s, query, weights, streams, y)
            if own:
                for j in range(streams):
                    for i in range(LANES):
                        y[j, i] += skips[i] * xs[at, j, i]
            _write(s, xs[at], steps[at], write[b, t] if write.size else none, streams)
            if late:
                _sums(s, query, weights, streams, y)
            copy(to_mean[b, t, low : low + n], to_m)
            copy(to_log[b, t, low : low + n], to_l)
            if beta.size:
                copy(to_free[b, t, low : low + n], to_f)
            _to_sums(y, to_m, to_f, to_l, shift, warm, to_sums[at], beta_sum, beta.size > 0)
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
            grad, x, d, old = to_sums[at], xs[at], steps[at], states[at]
            d_x[:] = 0.0
            d_d[:] = 0.0
            for m in range(modes):
                amount = np.float64(write[b, t, m]) if write.size else 1.0
                query = np.float64(read[b, t, m]) if read.size else 0.0
                read_sum, write_sum = 0.0, 0.0
                for j in range(streams):
                    for i in range(LANES):
                        # What the row reads: the state with the token in it, or without.
                        work[0, i] = old[j, m, i] + (amount * d[i] * x[j, i] if late else 0.0)
                    if read.size:
                        read_sum += dot(work, 0, grad[j])
                    else:
                        for i in range(LANES):
                            weight_sum[m, i] += work[0, i] * grad[j, i]
                    if late:
                        _pull(back, j, m, query, weights, grad, read.size > 0)
                    # The token's own writing.
                    for i in range(LANES):
                        d_x[j, i] += amount * back[j, m, i]
                    for i in range(LANES):
                        work[0, i] = back[j, m, i] * x[j, i]
                    if write.size:
                        write_sum += dot(work, 0, d)
                    for i in range(LANES):
                        d_d[i] += amount * work[0, i]
                    if not late:
                        _pull(back, j, m, query, weights, grad, read.size > 0)
                    # The decay: of its logarithm, rate times step.
                    for i in range(LANES):
                        work[0, i] = back[j, m, i] * old[j, m, i]
                    for i in range(LANES):
                        rate_sum[m, i] += work[0, i] * d[i]
                    for i in range(LANES):
                        d_d[i] += work[0, i] * rates[m, i]
                if read.size:
                    d_read[b, block, t, m] = read_sum
                if write.size:
                    d_write[b, block, t, m] = write_sum
            if step.size:
                copy(d_d[:n], d_step[b, t, low : low + n])
            for j in range(streams):
                for i in range(LANES):
                    d_x[j, i] *= d[i]
            if own:
                for j in range(streams):
                    for i in range(LANES):
                        d_x[j, i] += skips[i] * grad[j, i]
                        skip_sum[i] += x[j, i] * grad[j, i]
            for i in range(LANES):
                work[0, i] = d_x[1, i]
            if beta.size:
                for i in range(LANES):
                    weighted = x[2, i] * d_x[2, i]
                    work[0, i] += warm[i] * weighted
                    beta_sum[i] += x[1, i] * weighted
            copy(work[0, :n], d_v[b, t, low : low + n])
            if marks.size and marks[b, t] == START:
                back[:] = 0.0
            else:
                _decay(back, decays[at if step.size else 0], fades[at], streams)
    for m in range(modes):
        copy(rate_sum[m, :n], d_rate[b, m, low : low + n])
        if weight.size:
            copy(weight_sum[m, :n], d_weight[b, m, low : low + n])
        for j in range(3):
            copy(back[j, m, :n], d_state[b, j, m, low : low + n])
    if skip.size:
        copy(skip_sum[:n], d_skip[b, low : low + n])
    if beta.size:
        copy(beta_sum[:n], d_beta[b, low : low + n])


@job
def _pull(back, j, m, query, weight, to_y, by_token):  # type: ignore[no-untyped-def]
    """Add the gradient of what a row reads to the state's."""
    if by_token:
        for i in range(LANES):
            back[j, m, i] += query * to_y[j, i]
    else:
        for i in range(LANES):
            back[j, m, i] += weight[m, i] * to_y[j, i]


@job
def _to_sums(y, to_m, to_f, to_l, shift, warm, grad, beta_sum, energies):  # type: ignore[no-untyped-def]
    """Gradients grad [3, lanes] of the sums y from those of mean, free energy and log total."""
    for i in range(LANES):
        there = y[0, i] > TINY
        total = y[0, i] if there else 1.0
        toward_mean = to_m[i] if there else 0.0
        common = to_l[i] if there else 0.0
        average = y[1, i] / total
        if energies:
            toward_free = to_f[i] if there else 0.0
            ratio = y[2, i] / total
            value = (shift[i] + log(max(ratio, TINY))) / warm[i]
            free = ratio > TINY and value > average
            slope = toward_free / warm[i] if free else 0.0
            grad[2, i] = slope / y[2, i] if free else 0.0
            common -= slope
            beta_sum[i] -= slope * value if free else 0.0
            toward_mean += 0.0 if free else toward_free
        grad[1, i] = toward_mean / total
        grad[0, i] = (common - toward_mean * average) / total
