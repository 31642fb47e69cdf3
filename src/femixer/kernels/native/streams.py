"""Compiled kernels of `femixer.kernels.streams`, float32; what is computed is there.

Tensors [B, T, heads, channels] that are read are given as their memory and a line of strides (backend.memory); what is
written is contiguous. A task is a stretch of one sequence's tokens; what is summed or compared over tokens is so per
task, [tasks, heads, D].
"""

from __future__ import annotations

import numpy as np
from numba import prange

from femixer.kernels.native.primitives import ask_for, exp_less32, f32, inline, job, kernel, log_plus32, u64

# Tokens of a task.
TOKENS = 32
# Memory is asked for this many tokens ahead: the processor does not foresee reads that are often far apart.
AHEAD = 8


@job
def stretches(length):  # type: ignore[no-untyped-def]
    """Tasks of a sequence."""
    return -(-length // TOKENS)


@kernel
def span(v, at, length, bottom, top):  # type: ignore[no-untyped-def]
    """Smallest and largest value of each channel [tasks, G, D]."""
    per_sequence = stretches(length)
    for task in prange(top.shape[0]):
        _span(task // per_sequence, task % per_sequence * TOKENS, v, at, length, bottom[task], top[task])


@job
def _span(b, first, v, at, length, bottom, top):  # type: ignore[no-untyped-def]
    heads, n = top.shape
    if at[0, 2] == n:  # heads lie side by side too
        heads, n = 1, heads * n
    low, high = bottom.reshape(heads, n), top.reshape(heads, n)
    low[:] = f32(np.inf)
    high[:] = f32(-np.inf)
    for t in range(first, min(first + TOKENS, length)):
        for h in range(heads):
            _fetch(v, at, 0, b, t, h, n)
            start = _start(at, 0, b, t, h)
            _widen(v[start : start + u64(n)], low[h], high[h])


@job
def _widen(x, low, high):  # type: ignore[no-untyped-def]
    for i in range(u64(x.size)):
        low[i] = min(low[i], x[i])
        high[i] = max(high[i], x[i])


@kernel
def streams(v, at, beta, top, base, out):  # type: ignore[no-untyped-def]
    """out [B, S, G, 2 D] = v | exp(beta min(v - top, 0)) - base."""
    per_sequence = stretches(out.shape[1])
    for task in prange(out.shape[0] * per_sequence):
        _streams(task // per_sequence, task % per_sequence * TOKENS, v, at, beta, top, base, out)


@job
def _streams(b, first, v, at, beta, top, base, out):  # type: ignore[no-untyped-def]
    n, y = u64(top.shape[2]), out.reshape(-1)
    for t in range(first, min(first + TOKENS, out.shape[1])):
        for h in range(out.shape[2]):
            _fetch(v, at, 0, b, t, h, n)
            start, to = _start(at, 0, b, t, h), _row(out, b, t, h)
            for d in range(n):
                y[to + d] = v[start + d]
            for d in range(n):
                exponent = min(v[start + d] - top[b, h, d], f32(0.0)) * beta[h, d]
                y[to + n + d] = exp_less32(exponent, base[b, h, d])


@kernel
def read(sums, at, beta, top, base, mean, free, least):  # type: ignore[no-untyped-def]
    """From the sums (mu | total - base) to mean and free [B, T, H, D], and the least total of each channel."""
    per_sequence = stretches(mean.shape[1])
    for task in prange(mean.shape[0] * per_sequence):
        first = task % per_sequence * TOKENS
        _read(task // per_sequence, first, sums, at, beta, top, base, mean, free, least[task])


@job
def _read(b, first, sums, at, beta, top, base, mean, free, least):  # type: ignore[no-untyped-def]
    n = u64(mean.shape[3])
    least[:] = f32(np.inf)
    for t in range(first, min(first + TOKENS, mean.shape[1])):
        for h in range(mean.shape[2]):
            start = _start(at, 0, b, t, h)
            for d in range(n):
                mean[b, t, h, d] = sums[start + d]
            for d in range(n):
                least[h, d] = min(least[h, d], sums[start + n + d] + base[b, h, d])
            for d in range(n):
                free[b, t, h, d] = log_plus32(sums[start + n + d], base[b, h, d])
            for d in range(n):
                f = top[b, h, d] + free[b, t, h, d] / beta[h, d]
                # Rounding, or a sum beyond sight, may put F below the mean.
                free[b, t, h, d] = mean[b, t, h, d] if f < mean[b, t, h, d] else f


@kernel
def settle(sums, at, shape, beta, top, base, least):  # type: ignore[no-untyped-def]
    """The same in place: the totals of sums [B, T, H, 2 D] become F. shape = (B, T, H, D)."""
    per_sequence = stretches(shape[1])
    for task in prange(shape[0] * per_sequence):
        first = task % per_sequence * TOKENS
        _settle(task // per_sequence, first, sums, at, shape, beta, top, base, least[task])


@job
def _settle(b, first, sums, at, shape, beta, top, base, least):  # type: ignore[no-untyped-def]
    n = u64(shape[3])
    least[:] = f32(np.inf)
    for t in range(first, min(first + TOKENS, shape[1])):
        for h in range(shape[2]):
            start = _start(at, 0, b, t, h)
            for d in range(n):
                least[h, d] = min(least[h, d], sums[start + n + d] + base[b, h, d])
            for d in range(n):
                sums[start + n + d] = log_plus32(sums[start + n + d], base[b, h, d])
            for d in range(n):
                f, average = top[b, h, d] + sums[start + n + d] / beta[h, d], sums[start + d]
                sums[start + n + d] = average if f < average else f


@kernel
def undo(to_mean, to_free, mean, free, at, beta, top, base, apart, inner, sums, d_beta):  # type: ignore[no-untyped-def]
    """The sums again [B, T, H, 2 D], their gradients `inner`, and what the logarithm gives to beta."""
    per_sequence = stretches(inner.shape[1])
    for task in prange(inner.shape[0] * per_sequence):
        b, first = task // per_sequence, task % per_sequence * TOKENS
        _undo(b, first, to_mean, to_free, mean, free, at, beta, top, base, apart, inner, sums, d_beta[task])


@job
def _undo(b, first, to_mean, to_free, mean, free, at, beta, top, base, apart, inner, sums, d_beta):  # type: ignore[no-untyped-def]
    n, x, y = u64(top.shape[2]), inner.reshape(-1), sums.reshape(-1)
    below = np.empty(top.shape[2], dtype=f32)
    spread = at[3, 1] != inner.shape[2] * top.shape[2]  # some heads of many
    d_beta[:] = f32(0.0)
    for t in range(first, min(first + TOKENS, inner.shape[1])):
        for h in range(inner.shape[2]):
            to = _row(inner, b, t, h)
            if spread:
                _fetch(to_mean, at, 0, b, t, h, n)
                _fetch(to_free, at, 1, b, t, h, n)
                _fetch(mean, at, 2, b, t, h, n)
                _fetch(free, at, 3, b, t, h, n)
            from_mean, from_free = _start(at, 2, b, t, h), _start(at, 3, b, t, h)
            by_mean, by_free = _start(at, 0, b, t, h), _start(at, 1, b, t, h)
            for d in range(n):
                y[to + d] = mean[from_mean + d]
            if apart[b, h]:
                for d in range(n):
                    x[to + d] = x[to + n + d] = f32(0.0)
                    y[to + n + d] = f32(1.0) - base[b, h, d]
                continue
            for d in range(n):
                x[to + d] = to_mean[by_mean + d]
            for d in range(n):
                below[d] = free[from_free + d] - top[b, h, d]
            for d in range(n):
                y[to + n + d] = exp_less32(below[d] * beta[h, d], base[b, h, d])
            for d in range(n):
                below[d] *= to_free[by_free + d] / beta[h, d]
                d_beta[h, d] -= below[d]
            for d in range(n):
                x[to + n + d] = to_free[by_free + d] / (beta[h, d] * (y[to + n + d] + base[b, h, d]))


@kernel
def through(to_streams, streams, v, at, beta, top, base, d_v, d_beta):  # type: ignore[no-untyped-def]
    """From the gradients of the streams [B, S, G, 2 D] to those of v and beta."""
    per_sequence = stretches(d_v.shape[1])
    for task in prange(d_v.shape[0] * per_sequence):
        b, first = task // per_sequence, task % per_sequence * TOKENS
        _through(b, first, to_streams, streams, v, at, beta, top, base, d_v, d_beta[task])


@job
def _through(b, first, to_streams, streams, v, at, beta, top, base, d_v, d_beta):  # type: ignore[no-untyped-def]
    n, weighted = u64(top.shape[2]), np.empty(top.shape[2], dtype=f32)
    d_beta[:] = f32(0.0)
    for t in range(first, min(first + TOKENS, d_v.shape[1])):
        for h in range(d_v.shape[2]):
            _fetch(to_streams, at, 0, b, t, h, n + n)
            _fetch(streams, at, 1, b, t, h, n + n)
            _fetch(v, at, 2, b, t, h, n)
            by, of, start = _start(at, 0, b, t, h), _start(at, 1, b, t, h), _start(at, 2, b, t, h)
            for d in range(n):
                weighted[d] = to_streams[by + n + d] * (streams[of + n + d] + base[b, h, d])
            for d in range(n):
                d_v[b, t, h, d] = to_streams[by + d] + weighted[d] * beta[h, d]
            for d in range(n):
                d_beta[h, d] += weighted[d] * (v[start + d] - top[b, h, d])


@inline
def _start(at, line, b, t, h):  # type: ignore[no-untyped-def]
    """Where a token's head begins in memory."""
    return u64(b * at[line, 0] + t * at[line, 1] + h * at[line, 2])


@inline
def _fetch(x, at, line, b, t, h, n):  # type: ignore[no-untyped-def]
    """Ask for n channels of the same head of a token to come."""
    ahead = _start(at, line, b, t + AHEAD, h)
    for i in range(ahead, ahead + u64(n), u64(16)):  # lines of 64 bytes
        ask_for(x, i)


@inline
def _row(x, b, t, h):  # type: ignore[no-untyped-def]
    """The same in a contiguous tensor."""
    return u64(((b * x.shape[1] + t) * x.shape[2] + h) * x.shape[3])
