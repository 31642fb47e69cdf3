"""Compiled kernel of `femixer.projection`: the backward of rows that few features modulate, float32."""

from __future__ import annotations

import numba
import numpy as np
from numba import prange

from femixer.kernels.native.primitives import MATH, f32, job, kernel


@kernel
def backward(grad, x, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    """Gradients of x [n, width] and f [n, C], and those of m [C, width] from each task, [tasks, C, width].

    Rows are divided evenly among the tasks. eta = f m is made again, row by row.
    """
    for task in prange(dm.shape[0]):
        _backward(task, grad, x, f, m, scaled, dx, df, dm)


@job
def _backward(task, grad, x, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    step = -(-x.shape[0] // dm.shape[0])
    eta = np.empty(x.shape[1], dtype=f32)
    for c in range(m.shape[0]):
        for j in range(eta.size):
            dm[task, c, j] = f32(0.0)
    for row in range(task * step, min((task + 1) * step, x.shape[0])):
        _eta(f, m, row, eta)
        for j in range(scaled):
            dx[row, j] = grad[row, j] * (f32(1.0) + eta[j])
            eta[j] = grad[row, j] * x[row, j]
        for j in range(scaled, eta.size):
            dx[row, j] = grad[row, j]
            eta[j] = grad[row, j]
        for c in range(m.shape[0]):
            df[row, c] = _product(m, c, eta)
            feature = f[row, c]
            for j in range(eta.size):
                dm[task, c, j] += feature * eta[j]


@job
def _eta(f, m, row, eta):  # type: ignore[no-untyped-def]
    for j in range(eta.size):
        eta[j] = f[row, 0] * m[0, j]
    for c in range(1, m.shape[0]):
        feature = f[row, c]
        for j in range(eta.size):
            eta[j] += feature * m[c, j]


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", cache=True, nogil=True)
def _product(m, c, eta):  # type: ignore[no-untyped-def]
    total = f32(0.0)
    for j in range(eta.size):
        total += m[c, j] * eta[j]
    return total
