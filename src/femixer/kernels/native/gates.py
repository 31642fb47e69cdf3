"""Compiled kernels of `femixer.kernels.gating`, float32.

Every tensor [B, T, H, D] is given as its memory from its first element on, a line of `at` [., 3] with its strides along
batch, tokens and heads; the channels of a head lie side by side. Empty arrays stand for nothing: no temperature, no
gate. What is computed is in `femixer.gates`.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import prange

from femixer.kernels.native.primitives import MATH, copy, f32, job, kernel, sigmoid32, softplus32

# Lines of `at`.
MEAN, FREE, LAM, GATE, GRAD = range(5)
# Rows of the scratch array besides those: one array, so that the compiler sees that its rows do not overlap.
READ, POSITIVE, TO_MEAN, TO_FREE, TO_LAM, TO_GATE = range(5, 11)


@kernel
def forward(mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    """out [B, T, H, D] = softplus(gate) / rms * ((1 - sigmoid(lam)) mean + sigmoid(lam) free)."""
    for row in prange(out.shape[0] * out.shape[1]):
        _forward(row // out.shape[1], row % out.shape[1], mean, free, lam, gate, at, eps, out)


@job
def _forward(b, t, mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    width = out.shape[3]
    r = np.empty((11, width), dtype=f32)
    for h in range(out.shape[2]):
        _load(b, t, h, mean, free, lam, gate, at, r)
        _read(r, lam.size > 0)
        if gate.size:
            scale = _positive(r, eps)
            for i in range(width):
                r[READ, i] *= r[POSITIVE, i] * scale
        copy(r[READ], out[b, t, h])


@kernel
def backward(mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    """The gradients of `forward` for its arguments, [B, T, H, D] each."""
    for row in prange(to_mean.shape[0] * to_mean.shape[1]):
        b, t = row // to_mean.shape[1], row % to_mean.shape[1]
        _backward(b, t, mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate)


@job
def _backward(b, t, mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    width = to_mean.shape[3]
    r = np.empty((11, width), dtype=f32)
    for h in range(to_mean.shape[2]):
        _load(b, t, h, mean, free, lam, gate, at, r)
        copy(_head(grad, at, GRAD, b, t, h, width), r[GRAD])
        _read(r, lam.size > 0)
        if gate.size:
            scale = _positive(r, eps)
            along = _along(r, scale) / f32(width)
            # d g / d positive = scale (1 - g gᵀ / D): the norm takes out what points along g.
            for i in range(width):
                g = r[POSITIVE, i] * scale
                r[TO_GATE, i] = (r[GRAD, i] * r[READ, i] - g * along) * scale * sigmoid32(r[GATE, i])
            for i in range(width):
                r[GRAD, i] *= r[POSITIVE, i] * scale
            copy(r[TO_GATE], to_gate[b, t, h])
        if lam.size:
            for i in range(width):
                share = sigmoid32(r[LAM, i])
                r[TO_FREE, i] = r[GRAD, i] * share
                r[TO_MEAN, i] = r[GRAD, i] - r[TO_FREE, i]
                r[TO_LAM, i] = (r[FREE, i] - r[MEAN, i]) * r[TO_MEAN, i] * share
            copy(r[TO_LAM], to_lam[b, t, h])
            copy(r[TO_FREE], to_free[b, t, h])
            copy(r[TO_MEAN], to_mean[b, t, h])
        else:
            copy(r[GRAD], to_mean[b, t, h])


@job
def _head(x, at, line, b, t, h, width):  # type: ignore[no-untyped-def]
    start = b * at[line, 0] + t * at[line, 1] + h * at[line, 2]
    return x[start : start + width]


@job
def _load(b, t, h, mean, free, lam, gate, at, r):  # type: ignore[no-untyped-def]
    width = r.shape[1]
    copy(_head(mean, at, MEAN, b, t, h, width), r[MEAN])
    if lam.size:
        copy(_head(free, at, FREE, b, t, h, width), r[FREE])
        copy(_head(lam, at, LAM, b, t, h, width), r[LAM])
    if gate.size:
        copy(_head(gate, at, GATE, b, t, h, width), r[GATE])


@job
def _read(r, tempered):  # type: ignore[no-untyped-def]
    if tempered:
        for i in range(r.shape[1]):
            r[READ, i] = r[MEAN, i] + sigmoid32(r[LAM, i]) * (r[FREE, i] - r[MEAN, i])
    else:
        for i in range(r.shape[1]):
            r[READ, i] = r[MEAN, i]


@job
def _positive(r, eps):  # type: ignore[no-untyped-def]
    """softplus of the gate's logits, and one over its root mean square."""
    for i in range(r.shape[1]):
        r[POSITIVE, i] = softplus32(r[GATE, i])
    return f32(1.0 / math.sqrt(_squares(r) / r.shape[1] + eps))


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", cache=True, nogil=True)
def _squares(r):  # type: ignore[no-untyped-def]
    total = f32(0.0)
    for i in range(r.shape[1]):
        total += r[POSITIVE, i] * r[POSITIVE, i]
    return total


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", cache=True, nogil=True)
def _along(r, scale):  # type: ignore[no-untyped-def]
    """The sum of grad * read * g over the channels."""
    total = f32(0.0)
    for i in range(r.shape[1]):
        total += r[GRAD, i] * r[READ, i] * r[POSITIVE, i]
    return total * scale
