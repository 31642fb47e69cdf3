"""Compiled kernels of `femixer.projection`: rows modulated by eta = f m of few features, and their gradients, float32.

eta is made row by row and never stored. In the first `scaled` columns it multiplies (x + x eta), in the others it is
added.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from femixer.kernels.native.narrow import add_outer, combine, products
from femixer.kernels.native.primitives import f32, job, kernel

# Rows of a task of the forward pass.
ROWS = 32


@kernel
def forward(x, f, m, scaled, out):  # type: ignore[no-untyped-def]
    """x [n, width], f [n, C], m [C, width] -> out, which may be x."""
    for task in prange(-(-x.shape[0] // ROWS)):
        _forward(task * ROWS, min((task + 1) * ROWS, x.shape[0]), x, f, m, scaled, out)


@job
def _forward(first, last, x, f, m, scaled, out):  # type: ignore[no-untyped-def]
    eta = np.empty(x.shape[1], dtype=f32)
    for row in range(first, last):
        combine(f, row, m, eta)
        for j in range(scaled):
            eta[j] = x[row, j] + x[row, j] * eta[j]
        for j in range(scaled, eta.size):
            eta[j] += x[row, j]
        for j in range(eta.size):
            out[row, j] = eta[j]


@kernel
def backward(grad, x, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    """Gradients of x and f, and those of m from each task, [tasks, C, width].

    Rows are divided evenly among the tasks.
    """
    step = -(-x.shape[0] // dm.shape[0])
    for task in prange(dm.shape[0]):
        _backward(task * step, min((task + 1) * step, x.shape[0]), grad, x, f, m, scaled, dx, df, dm[task])


@job
def _backward(first, last, grad, x, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    dm[:] = f32(0.0)
    eta, to_eta = np.empty(x.shape[1], dtype=f32), np.zeros((4, x.shape[1]), dtype=f32)
    features = np.zeros((4, f.shape[1]), dtype=f32)
    for row in range(first, last):
        k = (row - first) % 4
        combine(f, row, m, eta)
        for j in range(scaled):
            dx[row, j] = grad[row, j] + grad[row, j] * eta[j]
        for j in range(scaled):
            to_eta[k, j] = grad[row, j] * x[row, j]
        for j in range(scaled, eta.size):
            dx[row, j] = grad[row, j]
        for j in range(scaled, eta.size):
            to_eta[k, j] = grad[row, j]
        products(m, to_eta, k, df, row)
        for c in range(f.shape[1]):
            features[k, c] = f[row, c]
        if k == 3 or row == last - 1:
            add_outer(features, to_eta, dm)
            features[:] = f32(0.0)
