"""Compiled kernels of `femixer.kernels.gating`, float32.

Every tensor [B, T, H, D] is given as its memory from its first element on, a line of `at` [., 3] with its strides along
batch, tokens and heads; the channels of a head lie side by side. Empty arrays stand for nothing: no temperature, no
gate. What is computed is in `femixer.gates`.

A task gathers some tokens side by side in the rows of a scratch array. Loops are then long whatever the width of a
head, and the compiler sees that what they read and write does not overlap.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.native.primitives import (
    f32,
    inline,
    job,
    kernel,
    sigmoid32,
    softplus32,
    softplus_slope32,
    summing,
    u64,
)

# Lines of `at`, and the first rows of the scratch array.
MEAN, FREE, LAM, GATE, GRAD = range(5)
# Its other rows: the read; softplus of the gate's logits; and, the same for a whole head, one over its root mean square
# and what the gradient has along it.
READ, POSITIVE, SCALE, ALONG = range(5, 9)
# Numbers of a task.
NUMBERS = 2048


@kernel
def forward(mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    """out [B, T, H, D] = softplus(gate) / rms * ((1 - sigmoid(lam)) mean + sigmoid(lam) free)."""
    step = _tokens(out)
    for task in prange(-(-out.shape[0] * out.shape[1] // step)):
        _forward(task * step, step, mean, free, lam, gate, at, f32(eps), out)


@job
def _forward(first, step, mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    count = min(step, out.shape[0] * out.shape[1] - first)
    size, to = _extent(first, count, out)
    y, r = out.reshape(-1), np.empty((9, size), dtype=f32)
    _load(first, count, out, mean, free, lam, gate, at, r)
    if lam.size:
        for i in range(size):
            r[MEAN, i] += sigmoid32(r[LAM, i]) * (r[FREE, i] - r[MEAN, i])
    if not gate.size:
        for i in range(size):
            y[to + i] = r[MEAN, i]
        return
    for i in range(size):
        r[POSITIVE, i] = softplus32(r[GATE, i])
    _scale(r, u64(out.shape[3]), eps)
    for i in range(size):
        y[to + i] = r[MEAN, i] * r[POSITIVE, i] * r[SCALE, i]


@kernel
def backward(mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    """The gradients of `forward` for its arguments, [B, T, H, D] each."""
    step = _tokens(to_mean)
    for task in prange(-(-to_mean.shape[0] * to_mean.shape[1] // step)):
        _backward(task * step, step, mean, free, lam, gate, grad, at, f32(eps), to_mean, to_free, to_lam, to_gate)


@job
def _backward(first, step, mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    count = min(step, to_mean.shape[0] * to_mean.shape[1] - first)
    size, to = _extent(first, count, to_mean)
    d_mean, d_free, d_lam, d_gate = to_mean.reshape(-1), to_free.reshape(-1), to_lam.reshape(-1), to_gate.reshape(-1)
    r = np.empty((9, size), dtype=f32)
    _load(first, count, to_mean, mean, free, lam, gate, at, r)
    _gather(grad, GRAD, first, count, to_mean, at, r)
    if lam.size:
        for i in range(size):
            r[LAM, i] = sigmoid32(r[LAM, i])
            r[FREE, i] -= r[MEAN, i]
            r[MEAN, i] += r[LAM, i] * r[FREE, i]
    if gate.size:
        _through_gate(r, u64(to_mean.shape[3]), eps)
        for i in range(size):
            d_gate[to + i] = r[GATE, i]
    if lam.size:
        for i in range(size):
            through = r[GRAD, i] * r[LAM, i]
            d_free[to + i] = through
            r[GRAD, i] -= through
        for i in range(size):
            d_lam[to + i] = r[FREE, i] * r[GRAD, i] * r[LAM, i]
    for i in range(size):
        d_mean[to + i] = r[GRAD, i]


@inline
def _through_gate(r, channels, eps):  # type: ignore[no-untyped-def]
    """GATE receives the gradient of the logits, GRAD that of the read, which is in MEAN.

    d g / d positive = scale (1 - g gᵀ / D): the norm takes out what points along g.
    """
    size = u64(r.shape[1])
    for i in range(size):
        r[POSITIVE, i], r[GATE, i] = softplus_slope32(r[GATE, i])
    _scale(r, channels, eps)
    for i in range(size):
        r[GRAD, i] *= r[SCALE, i]
        r[READ, i] = r[MEAN, i] * r[GRAD, i]
    _along(r, channels)
    for i in range(size):
        g = r[POSITIVE, i] * r[SCALE, i] * r[SCALE, i]
        r[GATE, i] *= r[READ, i] - g * r[ALONG, i]
        r[GRAD, i] *= r[POSITIVE, i]


@summing
def _scale(r, channels, eps):  # type: ignore[no-untyped-def]
    for start in range(u64(0), u64(r.shape[1]), channels):
        total = f32(0.0)
        for i in range(start, start + channels):
            total += r[POSITIVE, i] * r[POSITIVE, i]
        scale = f32(1.0) / math.sqrt(total / f32(channels) + eps)
        for i in range(start, start + channels):
            r[SCALE, i] = scale


@summing
def _along(r, channels):  # type: ignore[no-untyped-def]
    for start in range(u64(0), u64(r.shape[1]), channels):
        total = f32(0.0)
        for i in range(start, start + channels):
            total += r[READ, i] * r[POSITIVE, i]
        for i in range(start, start + channels):
            r[ALONG, i] = total / f32(channels)


@job
def _tokens(like):  # type: ignore[no-untyped-def]
    return max(1, NUMBERS // max(1, like.shape[2] * like.shape[3]))


@inline
def _extent(first, count, like):  # type: ignore[no-untyped-def]
    """Numbers of some tokens, and where the first of them lies."""
    return u64(count * like.shape[2] * like.shape[3]), u64(first * like.shape[2] * like.shape[3])


@inline
def _load(first, count, like, mean, free, lam, gate, at, r):  # type: ignore[no-untyped-def]
    _gather(mean, MEAN, first, count, like, at, r)
    if lam.size:
        _gather(free, FREE, first, count, like, at, r)
        _gather(lam, LAM, first, count, like, at, r)
    if gate.size:
        _gather(gate, GATE, first, count, like, at, r)


@inline
def _gather(x, line, first, count, like, at, r):  # type: ignore[no-untyped-def]
    """Some tokens of x, which has the shape of `like`, as a row."""
    length, heads, size = like.shape[1], like.shape[2], u64(like.shape[3])
    if at[line, 2] == like.shape[3]:  # heads lie side by side too
        heads, size = 1, u64(heads * like.shape[3])
    b, t, to = first // length, first % length, u64(0)
    for _ in range(count):
        for h in range(heads):
            start = u64(b * at[line, 0] + t * at[line, 1] + h * at[line, 2])
            for i in range(size):
                r[line, to + i] = x[start + i]
            to += size
        t += 1
        if t == length:
            b, t = b + 1, 0
