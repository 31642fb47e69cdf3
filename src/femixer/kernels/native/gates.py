"""Compiled kernels of `femixer.kernels.gating`, float32.

Every tensor [B, T, H, D] is given as its memory from its first element on, a line of `at` [., 3] with its strides along
batch, tokens and heads; the channels of a head lie side by side. Empty arrays stand for nothing: no temperature, no
gate. What is computed is in `femixer.gates`.

A task gathers some tokens side by side in scratch rows, so that loops are long whatever the width of a head. Rows are
also seen as [heads, D]: an index that is a sum might be negative for all that the compiler knows, and its loop is not
vectorised.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import prange

from femixer.kernels.native.primitives import MATH, copy, f32, job, kernel, sigmoid32, softplus32

# Lines of `at`.
MEAN, FREE, LAM, GATE, GRAD = range(5)
# Rows of the scratch array besides those: one array, so that the compiler sees that its rows do not overlap. POSITIVE
# is softplus of the gate's logits; SCALE, one over its root mean square, and ALONG are the same for a whole head.
READ, POSITIVE, SCALE, ALONG = range(5, 9)
ROWS = 9
# Of a task.
NUMBERS = 2048


@kernel
def forward(mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    """out [B, T, H, D] = softplus(gate) / rms * ((1 - sigmoid(lam)) mean + sigmoid(lam) free)."""
    step = _tokens(out)
    for task in prange(-(-out.shape[0] * out.shape[1] // step)):
        _forward(task * step, step, mean, free, lam, gate, at, eps, out)


@job
def _forward(first, step, mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    channels, count = out.shape[3], min(step, out.shape[0] * out.shape[1] - first)
    r = np.empty((ROWS, count * out.shape[2] * channels), dtype=f32)
    _load(first, count, out, mean, free, lam, gate, at, r)
    _read(r, lam.size > 0)
    if gate.size:
        _positive(r, channels, eps)
        for i in range(r.shape[1]):
            r[READ, i] *= r[POSITIVE, i] * r[SCALE, i]
    _store(r, READ, first, out)


@kernel
def backward(mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    """The gradients of `forward` for its arguments, [B, T, H, D] each."""
    step = _tokens(to_mean)
    for task in prange(-(-to_mean.shape[0] * to_mean.shape[1] // step)):
        _backward(task * step, step, mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate)


@job
def _backward(first, step, mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    channels, count = to_mean.shape[3], min(step, to_mean.shape[0] * to_mean.shape[1] - first)
    r = np.empty((ROWS, count * to_mean.shape[2] * channels), dtype=f32)
    _load(first, count, to_mean, mean, free, lam, gate, at, r)
    _gather(grad, GRAD, first, count, to_mean, at, r)
    _read(r, lam.size > 0)
    if gate.size:
        _through_gate(r, channels, eps)
        _store(r, GATE, first, to_gate)
    if lam.size:
        _through_temperature(r)
        _store(r, LAM, first, to_lam)
        _store(r, FREE, first, to_free)
    _store(r, GRAD, first, to_mean)


@job
def _through_gate(r, channels, eps):  # type: ignore[no-untyped-def]
    """GATE receives the gradient of the logits, GRAD that of the read.

    d g / d positive = scale (1 - g gᵀ / D): the norm takes out what points along g.
    """
    _positive(r, channels, eps)
    for i in range(r.shape[1]):
        r[READ, i] *= r[GRAD, i] * r[SCALE, i]
    heads = r.reshape((ROWS, r.shape[1] // channels, channels))
    for h in range(heads.shape[1]):
        along = _dot(heads, READ, POSITIVE, h) / f32(channels)
        for i in range(channels):
            heads[ALONG, h, i] = along
    for i in range(r.shape[1]):
        g = r[POSITIVE, i] * r[SCALE, i]
        r[GATE, i] = (r[READ, i] - g * r[SCALE, i] * r[ALONG, i]) * sigmoid32(r[GATE, i])
        r[GRAD, i] *= g


@job
def _through_temperature(r):  # type: ignore[no-untyped-def]
    """LAM, FREE and GRAD receive the gradients of the logits, of the free energy and of the mean."""
    for i in range(r.shape[1]):
        share = sigmoid32(r[LAM, i])
        to_free = r[GRAD, i] * share
        r[GRAD, i] -= to_free
        r[LAM, i] = (r[FREE, i] - r[MEAN, i]) * r[GRAD, i] * share
        r[FREE, i] = to_free


@job
def _tokens(like):  # type: ignore[no-untyped-def]
    return max(1, NUMBERS // max(1, like.shape[2] * like.shape[3]))


@job
def _load(first, count, like, mean, free, lam, gate, at, r):  # type: ignore[no-untyped-def]
    _gather(mean, MEAN, first, count, like, at, r)
    if lam.size:
        _gather(free, FREE, first, count, like, at, r)
        _gather(lam, LAM, first, count, like, at, r)
    if gate.size:
        _gather(gate, GATE, first, count, like, at, r)


@job
def _gather(x, line, first, count, like, at, r):  # type: ignore[no-untyped-def]
    """Some tokens of x, which has the shape of `like`, as a row."""
    length, heads, channels = like.shape[1:]
    size = channels
    if at[line, 2] == channels:  # heads lie side by side too
        heads, size = 1, heads * channels
    rows = r.reshape((ROWS, count * heads, size))
    for token in range(count):
        b, t = (first + token) // length, (first + token) % length
        for h in range(heads):
            start = b * at[line, 0] + t * at[line, 1] + h * at[line, 2]
            copy(x[start : start + size], rows[line, token * heads + h])


@job
def _store(r, row, first, out):  # type: ignore[no-untyped-def]
    """A row as consecutive tokens of `out`."""
    start = first * out.shape[2] * out.shape[3]
    copy(r[row], out.reshape(-1)[start : start + r.shape[1]])


@job
def _read(r, tempered):  # type: ignore[no-untyped-def]
    if tempered:
        for i in range(r.shape[1]):
            r[READ, i] = r[MEAN, i] + sigmoid32(r[LAM, i]) * (r[FREE, i] - r[MEAN, i])
    else:
        for i in range(r.shape[1]):
            r[READ, i] = r[MEAN, i]


@job
def _positive(r, channels, eps):  # type: ignore[no-untyped-def]
    for i in range(r.shape[1]):
        r[POSITIVE, i] = softplus32(r[GATE, i])
    heads = r.reshape((ROWS, r.shape[1] // channels, channels))
    for h in range(heads.shape[1]):
        scale = f32(1.0) / math.sqrt(_dot(heads, POSITIVE, POSITIVE, h) / f32(channels) + f32(eps))
        for i in range(channels):
            heads[SCALE, h, i] = scale


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", forceinline=True)
def _dot(heads, a, b, h):  # type: ignore[no-untyped-def]
    """Of two rows, over the channels of one head."""
    total = f32(0.0)
    for i in range(heads.shape[2]):
        total += heads[a, h, i] * heads[b, h, i]
    return total
