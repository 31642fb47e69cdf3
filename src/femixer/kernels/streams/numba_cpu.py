"""The functions of `femixer.kernels.streams` as compiled kernels, for float32 on a CPU.

Tensors [B, T, heads, channels] that are read are given as their memory and a line of strides (`strided`); what
is written is contiguous. A task is a stretch of one sequence's tokens; what is summed or compared over tokens is so per
task, [tasks, heads, D].

Without them a softmax layer takes 8 to 19 % longer at 128 and 256 tokens and 3 to 4 % at 1024, a training step of a
language model 5 %.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.numba_kernel import inline, job, kernel, strided, u64
from femixer.kernels.numba_math import exp_less32, f32, log_plus32
from femixer.kernels.streams import FAR_BELOW, NARROW, SMALL_BETA, Range, Shift, least_sum

# What the kernels compare with: the least total, the nats of a narrow channel, the least beta of others, and how far
# below top F may lie.
LIMITS = np.array([least_sum(torch.float32), NARROW, SMALL_BETA, FAR_BELOW], dtype=np.float32)
_NO_HEADS = np.empty((0, 0), dtype=np.bool_)
# Tokens of a task.
TOKENS = 32


def value_streams(v: Tensor, beta: Tensor | None, shift: Shift | None) -> Tensor:
    if beta is None or shift is None:
        return v
    out = v.new_empty(*v.shape[:-1], 2 * v.shape[-1])
    streams(*strided(v), beta, shift.top[:, 0], shift.base[:, 0], out)
    return out


def read_sums(sums: Tensor, beta: Tensor, shift: Shift, reach: Range) -> tuple[Tensor, Tensor, Tensor | None]:
    """mu and F are parts of the sums, which are used up."""
    b, t, h, d = *sums.shape[:3], sums.shape[3] // 2
    sums = sums if sums.stride(3) == 1 else sums.contiguous()
    mean, total = sums.split(d, -1)
    doubtful, shape = torch.zeros(b, h, dtype=torch.bool), (b, t, h, d)
    settle(*strided(sums, total), shape, beta, reach.bottom[:, 0], shift.top[:, 0], shift.base[:, 0], LIMITS, doubtful)
    return mean, total, doubtful


def undo_read(
    to_mean: Tensor, to_free: Tensor, mean: Tensor, free: Tensor, beta: Tensor, shift: Shift, apart: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    b, t, h, d = free.shape
    inner, sums = free.new_empty(2, b, t, h, 2 * d)
    dbeta = free.new_empty(b * stretches(t), h, d)
    hidden = _NO_HEADS if apart is None else apart
    inputs = (*strided(to_mean, to_free, mean, free), beta, shift.top[:, 0], shift.base[:, 0], hidden)
    undo(*inputs, inner, sums, dbeta)
    return inner, sums, dbeta.sum(0).unflatten(0, (-1, h // beta.shape[0])).sum(1)


def undo_streams(to_streams: Tensor, given: Tensor, v: Tensor, beta: Tensor, shift: Shift) -> tuple[Tensor, Tensor]:
    dv, dbeta = v.new_empty(*v.shape), v.new_empty(v.shape[0] * stretches(v.shape[1]), *v.shape[2:])
    through(*strided(to_streams, given, v), beta, shift.top[:, 0], shift.base[:, 0], dv, dbeta)
    return dv, dbeta.sum(0)


@job
def stretches(length):  # type: ignore[no-untyped-def]
    """Tasks of a sequence."""
    return -(-length // TOKENS)


@kernel
def streams(v, at, beta, top, base, out):  # type: ignore[no-untyped-def]
    """out [B, S, G, 2 D] = v | exp(beta min(v - top, 0)) - base."""
    per_sequence = stretches(out.shape[1])
    for task in prange(out.shape[0] * per_sequence):
        streams_of(task // per_sequence, task % per_sequence * TOKENS, v, at, beta, top, base, out)


@job
def streams_of(b, first, v, at, beta, top, base, out):  # type: ignore[no-untyped-def]
    n, y = u64(top.shape[2]), out.reshape(-1)
    for t in range(first, min(first + TOKENS, out.shape[1])):
        for h in range(out.shape[2]):
            start, to = _start(at, 0, b, t, h), _row(out, b, t, h)
            for d in range(n):
                y[to + d] = v[start + d]
            for d in range(n):
                exponent = min(v[start + d] - top[b, h, d], f32(0.0)) * beta[h, d]
                y[to + n + d] = exp_less32(exponent, base[b, h, d])


@kernel
def settle(sums, free, at, shape, beta, bottom, top, base, limits, doubtful):  # type: ignore[no-untyped-def]
    """From the sums (mu | total - base) [B, T, H, 2 D] to F, which may lie where the totals do; shape = (B, T, H, D).

    Heads whose F is not good are marked as doubtful [B, H], by the limits of `femixer.kernels.streams`: the least
    total, nats of a narrow channel, the least beta of others, and how far F may lie below top.
    """
    per_sequence = stretches(shape[1])
    for task in prange(shape[0] * per_sequence):
        b, first = task // per_sequence, task % per_sequence * TOKENS
        settle_tokens(b, first, sums, free, at, shape, beta, bottom[b], top[b], base[b], limits, doubtful[b])


@job
def settle_tokens(b, first, sums, free, at, shape, beta, bottom, top, base, limits, doubtful):  # type: ignore[no-untyped-def]
    n, repeats, last = u64(shape[3]), shape[2] // top.shape[0], min(first + TOKENS, shape[1])
    least, row = np.empty(shape[3], dtype=f32), np.empty(shape[3], dtype=f32)
    for h in range(shape[2]):
        g = h // repeats
        least[:] = f32(np.inf)
        for t in range(first, last):
            start, to = _start(at, 0, b, t, h), _start(at, 1, b, t, h)
            for d in range(n):
                least[d] = min(least[d], sums[start + n + d] + base[g, d])
            for d in range(n):
                row[d] = log_plus32(sums[start + n + d], base[g, d])
            for d in range(n):
                f, average = top[g, d] + row[d] / beta[g, d], sums[start + d]
                # Rounding, or a sum beyond sight, may put F below the mean; the logarithm hides what is not a number.
                row[d] = average if (f < average) | (average != average) else f
            for d in range(n):
                free[to + d] = row[d]
        high = False
        for d in range(n):
            height = top[g, d] - bottom[g, d]
            high = high or height > limits[3]
            if least[d] < limits[0] or (beta[g, d] * height > limits[1] and beta[g, d] < limits[2]):
                doubtful[h] = True
        if high:
            for t in range(first, last):
                to = _start(at, 1, b, t, h)
                for d in range(n):
                    if top[g, d] - free[to + d] > limits[3] * max(abs(free[to + d]), f32(1.0)):
                        doubtful[h] = True


@kernel
def undo(to_mean, to_free, mean, free, at, beta, top, base, apart, inner, sums, d_beta):  # type: ignore[no-untyped-def]
    """The sums again [B, T, H, 2 D], their gradients `inner`, and what the logarithm gives to beta. Heads that
    stand apart [B, H], if there are such, take no part."""
    per_sequence = stretches(inner.shape[1])
    for task in prange(inner.shape[0] * per_sequence):
        b, first = task // per_sequence, task % per_sequence * TOKENS
        _undo(b, first, to_mean, to_free, mean, free, at, beta, top, base, apart, inner, sums, d_beta[task])


@job
def _undo(b, first, to_mean, to_free, mean, free, at, beta, top, base, apart, inner, sums, d_beta):  # type: ignore[no-untyped-def]
    n, x, y, repeats = u64(top.shape[2]), inner.reshape(-1), sums.reshape(-1), inner.shape[2] // top.shape[1]
    below = np.empty(top.shape[2], dtype=f32)
    d_beta[:] = f32(0.0)
    for t in range(first, min(first + TOKENS, inner.shape[1])):
        for h in range(inner.shape[2]):
            to, g = _row(inner, b, t, h), h // repeats
            from_mean, from_free = _start(at, 2, b, t, h), _start(at, 3, b, t, h)
            by_mean, by_free = _start(at, 0, b, t, h), _start(at, 1, b, t, h)
            for d in range(n):
                y[to + d] = mean[from_mean + d]
            if apart.size and apart[b, h]:
                for d in range(n):
                    x[to + d] = x[to + n + d] = f32(0.0)
                    y[to + n + d] = f32(1.0) - base[b, g, d]
                continue
            for d in range(n):
                x[to + d] = to_mean[by_mean + d]
            for d in range(n):
                below[d] = free[from_free + d] - top[b, g, d]
            for d in range(n):
                y[to + n + d] = exp_less32(below[d] * beta[g, d], base[b, g, d])
            for d in range(n):
                below[d] *= to_free[by_free + d] / beta[g, d]
                d_beta[h, d] -= below[d]
            for d in range(n):
                x[to + n + d] = to_free[by_free + d] / (beta[g, d] * (y[to + n + d] + base[b, g, d]))


@kernel
def through(to_streams, streams, v, at, beta, top, base, d_v, d_beta):  # type: ignore[no-untyped-def]
    """From the gradients of the streams [B, S, G, 2 D] to those of v and beta."""
    per_sequence = stretches(d_v.shape[1])
    for task in prange(d_v.shape[0] * per_sequence):
        b, first = task // per_sequence, task % per_sequence * TOKENS
        through_tokens(b, first, to_streams, streams, v, at, beta, top, base, d_v, d_beta[task])


@job
def through_tokens(b, first, to_streams, streams, v, at, beta, top, base, d_v, d_beta):  # type: ignore[no-untyped-def]
    n, weighted = u64(top.shape[2]), np.empty(top.shape[2], dtype=f32)
    d_beta[:] = f32(0.0)
    for t in range(first, min(first + TOKENS, d_v.shape[1])):
        for h in range(d_v.shape[2]):
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
def _row(x, b, t, h):  # type: ignore[no-untyped-def]
    """The same in a contiguous tensor."""
    return u64(((b * x.shape[1] + t) * x.shape[2] + h) * x.shape[3])
