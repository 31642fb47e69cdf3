"""Compiled kernels of the conditioner's features, SiLU(softplus(a) / |softplus(a)|) * LN(h), float32.

LANES tokens side by side: their features may be as few as four.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.native.primitives import f32, job, kernel, sigmoid32, softplus32

LANES = 32
# F.normalize's least norm.
LEAST = f32(1e-12)


@kernel
def forward(a, h, eps, out):  # type: ignore[no-untyped-def]
    """a, h, out [n, C]."""
    for task in prange(-(-a.shape[0] // LANES)):
        _forward(task * LANES, a, h, eps, out)


@job
def _forward(first, a, h, eps, out):  # type: ignore[no-untyped-def]
    at, ht = _loaded(first, a), _loaded(first, h)
    length, spread = np.empty(LANES, dtype=f32), np.empty(LANES, dtype=f32)
    _direction(at, length)
    _normalised(ht, eps, spread)
    for c in range(at.shape[0]):
        for lane in range(length.size):
            at[c, lane] *= sigmoid32(at[c, lane]) * ht[c, lane]
    _store(first, at, out)


@kernel
def backward(grad, a, h, eps, to_a, to_h):  # type: ignore[no-untyped-def]
    for task in prange(-(-a.shape[0] // LANES)):
        _backward(task * LANES, grad, a, h, eps, to_a, to_h)


@job
def _backward(first, grad, a, h, eps, to_a, to_h):  # type: ignore[no-untyped-def]
    """With z = softplus(a) / |.|, y = LN(h): both norms take out what points along their results."""
    g, logits, z, y = _loaded(first, grad), _loaded(first, a), _loaded(first, a), _loaded(first, h)
    length, spread = np.empty(LANES, dtype=f32), np.empty(LANES, dtype=f32)
    along_z, mean, along_y = np.zeros(LANES, dtype=f32), np.zeros(LANES, dtype=f32), np.zeros(LANES, dtype=f32)
    _direction(z, length)
    _normalised(y, eps, spread)
    dz = np.empty_like(z)
    for c in range(z.shape[0]):
        for lane in range(length.size):
            share = sigmoid32(z[c, lane])
            dz[c, lane] = g[c, lane] * y[c, lane] * share * (f32(1.0) + z[c, lane] * (f32(1.0) - share))
            g[c, lane] *= z[c, lane] * share
        for lane in range(length.size):
            along_z[lane] += dz[c, lane] * z[c, lane]
            mean[lane] += g[c, lane]
            along_y[lane] += g[c, lane] * y[c, lane]
    channels = f32(z.shape[0])
    for c in range(z.shape[0]):
        for lane in range(length.size):
            dz[c, lane] = (dz[c, lane] - z[c, lane] * along_z[lane]) / length[lane] * sigmoid32(logits[c, lane])
            g[c, lane] = (g[c, lane] - (mean[lane] + y[c, lane] * along_y[lane]) / channels) * spread[lane]
    _store(first, dz, to_a)
    _store(first, g, to_h)


@job
def _direction(a, length):  # type: ignore[no-untyped-def]
    """softplus(a) / |softplus(a)| in place, and the length."""
    length[:] = f32(0.0)
    for c in range(a.shape[0]):
        for lane in range(length.size):
            a[c, lane] = softplus32(a[c, lane])
            length[lane] += a[c, lane] * a[c, lane]
    for lane in range(length.size):
        length[lane] = max(math.sqrt(length[lane]), LEAST)
    for c in range(a.shape[0]):
        for lane in range(length.size):
            a[c, lane] /= length[lane]


@job
def _normalised(h, eps, spread):  # type: ignore[no-untyped-def]
    """LN(h) in place, and one over the standard deviation."""
    mean = np.zeros(spread.size, dtype=f32)
    spread[:] = f32(0.0)
    channels = f32(h.shape[0])
    for c in range(h.shape[0]):
        for lane in range(spread.size):
            mean[lane] += h[c, lane] / channels
    for c in range(h.shape[0]):
        for lane in range(spread.size):
            h[c, lane] -= mean[lane]
            spread[lane] += h[c, lane] * h[c, lane]
    for lane in range(spread.size):
        spread[lane] = f32(1.0) / f32(math.sqrt(spread[lane] / channels + eps))
    for c in range(h.shape[0]):
        for lane in range(spread.size):
            h[c, lane] *= spread[lane]


@job
def _loaded(first, x):  # type: ignore[no-untyped-def]
    """Tokens from `first` on as [C, lanes]; zeros where there are none."""
    out = np.zeros((x.shape[1], LANES), dtype=f32)
    for lane in range(min(LANES, x.shape[0] - first)):
        for c in range(x.shape[1]):
            out[c, lane] = x[first + lane, c]
    return out


@job
def _store(first, x, out):  # type: ignore[no-untyped-def]
    for lane in range(min(LANES, out.shape[0] - first)):
        for c in range(out.shape[1]):
            out[first + lane, c] = x[c, lane]
