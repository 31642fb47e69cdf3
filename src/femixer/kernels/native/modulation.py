"""Compiled kernels of `femixer.projection`: rows modulated by eta = f m of few features, and their gradients, float32.

eta is made row by row and never stored. In the first `scaled` columns it multiplies (x + x eta), in the others it is
added.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from femixer.kernels.native.narrow import add_outer, combine, products, take
from femixer.kernels.native.primitives import f32, inline, job, kernel

# Rows of a task of the forward pass.
ROWS = 32


@kernel
def forward(x, f, m, scaled, out):  # type: ignore[no-untyped-def]
    """x [n, width], f [n, C], m [C, width] -> out, which may be x."""
    for task in prange(-(-x.shape[0] // ROWS)):
        _forward(task * ROWS, min((task + 1) * ROWS, x.shape[0]), x, f, m, scaled, out)


@job
def _forward(first, last, x, f, m, scaled, out):  # type: ignore[no-untyped-def]
    eta, features = np.empty((4, x.shape[1]), dtype=f32), np.empty((4, f.shape[1]), dtype=f32)
    for start in range(first, last, 4):
        take(f, start, last, features)
        combine(features, m, eta)
        for k in range(min(4, last - start)):
            row = start + k
            for j in range(scaled):
                eta[k, j] = x[row, j] + x[row, j] * eta[k, j]
            for j in range(scaled, eta.shape[1]):
                eta[k, j] += x[row, j]
            for j in range(eta.shape[1]):
                out[row, j] = eta[k, j]


@kernel
def backward(grads, x, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    """Gradients of x and f, and those of m from each task, [tasks, C, width].

    grads: a tuple of arrays [n, .], of the columns one after the other. Rows are divided evenly among the tasks.
    """
    step = -(-x.shape[0] // dm.shape[0])
    for task in prange(dm.shape[0]):
        _backward(task * step, min((task + 1) * step, x.shape[0]), grads, x, f, m, scaled, dx, df, dm[task])


@job
def _backward(first, last, grads, x, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    dm[:] = f32(0.0)
    eta, grad = np.empty((4, x.shape[1]), dtype=f32), np.zeros((4, x.shape[1]), dtype=f32)
    features, to_features = np.empty((4, f.shape[1]), dtype=f32), np.empty((4, f.shape[1]), dtype=f32)
    for start in range(first, last, 4):
        take(f, start, last, features)
        combine(features, m, eta)
        count = min(4, last - start)
        for k in range(count):
            row = start + k
            _beside(grads, row, grad, k)
            for j in range(scaled):
                dx[row, j] = grad[k, j] + grad[k, j] * eta[k, j]
            for j in range(scaled, eta.shape[1]):
                dx[row, j] = grad[k, j]
            for j in range(scaled):
                grad[k, j] *= x[row, j]  # of eta
        products(m, grad, to_features)
        for k in range(count):
            for c in range(f.shape[1]):
                df[start + k, c] = to_features[k, c]
        add_outer(features, grad, dm)  # rows that are missing have no features


@inline
def _beside(pieces, row, out, k):  # type: ignore[no-untyped-def]
    """out[k] = the row of all pieces, side by side."""
    at = 0
    for p in range(len(pieces)):
        piece = pieces[p]
        for j in range(piece.shape[1]):
            out[k, at + j] = piece[row, j]
        at += piece.shape[1]
