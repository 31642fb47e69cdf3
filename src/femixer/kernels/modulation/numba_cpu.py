"""Modulation by compiled loops that multiply few features with the matrix too, row by row: products with so narrow a
matrix cost more elsewhere, and eta need not be stored. With many features torch's products take most of the time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels import modulation as in_torch
from femixer.kernels.numba_kernel import inline, job, kernel, rows, summing, u64
from femixer.kernels.numba_math import f32

FLOATS = (torch.float32,)
READS_ARGUMENTS = ("features", "matrix", "scaled", "widths")
READS_RESULTS = slice(-1, None)

# A layer of 64 to 256 channels takes 5 to 8 % longer in torch. Loops around torch's products of 16 features saved 1 %
# of a layer of 512.
FEW = 8
# Rows whose gradients of the matrix one task sums up, and rows of a task of the forward pass.
SUMMED, ROWS = 512, 32
# The smallest factor 1 + eta: half of float32's eps.
LEAST = f32(2**-24)


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    if matrix.shape[1] > FEW:
        return in_torch.forward(x, features, matrix, scaled, widths)
    y = x.new_empty(*x.shape)
    given, f, out = rows(x, features, y)
    forward_kernel(given, f, matrix.mT, scaled, out)
    return *y.split(widths, -1), y


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    _, features, matrix, scaled, widths = arguments
    if matrix.shape[1] > FEW:
        return in_torch.backward(grads, arguments, results, needed)
    (y,), found = results, zip(grads, widths, strict=False)
    given = [y.new_zeros(*y.shape[:-1], width) if g is None else g for g, width in found]
    to_x, to_features = y.new_empty(*y.shape), features.new_empty(*features.shape)
    out, into, f, to_f, *pieces = rows(y, to_x, features, to_features, *given)
    to_m = matrix.new_empty(-(-out.shape[0] // SUMMED), *matrix.mT.shape)
    backward_kernel(tuple(pieces), out, f, matrix.mT, scaled, into, to_f, to_m)
    return to_x, to_features, to_m.sum(0).mT


@kernel
def forward_kernel(x, f, m, scaled, out):  # type: ignore[no-untyped-def]
    """x, out [n, width], f [n, C], m [C, width]."""
    for task in prange(-(-x.shape[0] // ROWS)):
        _forward(task * ROWS, min((task + 1) * ROWS, x.shape[0]), x, f, m, scaled, out)


@job
def _forward(first, last, x, f, m, scaled, out):  # type: ignore[no-untyped-def]
    eta, features = np.empty((4, x.shape[1]), dtype=f32), np.empty((4, f.shape[1]), dtype=f32)
    for start in range(first, last, 4):
        _take(f, start, last, features)
        _factors(features, m, scaled, eta)
        for k in range(min(4, last - start)):
            row = start + k
            for j in range(scaled):
                eta[k, j] *= x[row, j]
            for j in range(scaled, eta.shape[1]):
                eta[k, j] += x[row, j]
            for j in range(eta.shape[1]):
                out[row, j] = eta[k, j]


@kernel
def backward_kernel(grads, y, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    """Gradients of x and f, and those of m from each task, [tasks, C, width], for the results y of `forward`.

    grads: a tuple of arrays [n, .], of the columns one after the other. Rows are divided evenly among the tasks.
    """
    step = -(-y.shape[0] // dm.shape[0])
    for task in prange(dm.shape[0]):
        _backward(task * step, min((task + 1) * step, y.shape[0]), grads, y, f, m, scaled, dx, df, dm[task])


@job
def _backward(first, last, grads, y, f, m, scaled, dx, df, dm):  # type: ignore[no-untyped-def]
    df[first:last] = f32(0.0)
    at = 0
    for p in range(len(grads)):
        _backward_piece(first, last, at, grads[p], y, f, m, at < scaled, dx, df, dm)
        at += grads[p].shape[1]


@job
def _backward_piece(first, last, at, grads, y, f, m, multiplied, dx, df, dm):  # type: ignore[no-untyped-def]
    """The same for some columns from `at` on: all that is used for every row is then so small that it stays near."""
    channels, width = f.shape[1], grads.shape[1]
    matrix, to_matrix = m[:, at : at + width].copy(), np.zeros((channels, width), dtype=f32)
    factors, grad = np.empty((4, width), dtype=f32), np.zeros((4, width), dtype=f32)
    features, to_features = np.empty((4, channels), dtype=f32), np.empty((4, channels), dtype=f32)
    n, begin = u64(width), u64(at)
    for start in range(first, last, 4):
        _take(f, start, last, features)
        if multiplied:
            _factors(features, matrix, width, factors)
        count = min(4, last - start)
        for k in range(count):
            row = start + k
            if multiplied:
                for j in range(n):
                    dx[row, begin + j] = grads[row, j] * factors[k, j]
                for j in range(n):
                    grad[k, j] = grads[row, j] * (y[row, begin + j] / factors[k, j])
            else:
                for j in range(n):
                    dx[row, begin + j] = grad[k, j] = grads[row, j]
        _products(matrix, grad, to_features)
        for k in range(count):
            for c in range(channels):
                df[start + k, c] += to_features[k, c]
        _add_outer(features, grad, to_matrix)  # rows that are missing have no features
    dm[:, at : at + width] = to_matrix


@inline
def _factors(features, m, scaled, out):  # type: ignore[no-untyped-def]
    """out [4, width] = 1 + eta in the first `scaled` columns, eta in the others: to the last bit the same for both
    directions, of which one divides by what the other multiplied with."""
    _combine(features, m, out)
    for k in range(4):
        for j in range(scaled):
            factor = f32(1.0) + out[k, j]
            out[k, j] = LEAST if abs(factor) < LEAST else factor  # NaN stays NaN


# Products of rows with a matrix m [C, width] of few rows. Four rows are taken at a time, and forwards two columns of
# theirs: then a number is loaded and stored once for eight products.


@inline
def _combine(f, m, out):  # type: ignore[no-untyped-def]
    """out [4, width] = f m, for f [4, C]."""
    first = m.shape[0] % 2
    for k in range(4):
        for j in range(out.shape[1]):
            out[k, j] = f[k, 0] * m[0, j] if first else f32(0.0)
    for c in range(first, m.shape[0], 2):
        p0, p1, q0, q1 = f[0, c], f[0, c + 1], f[1, c], f[1, c + 1]
        r0, r1, s0, s1 = f[2, c], f[2, c + 1], f[3, c], f[3, c + 1]
        for j in range(out.shape[1]):
            m0, m1 = m[c, j], m[c + 1, j]
            out[0, j] += p0 * m0 + p1 * m1
            out[1, j] += q0 * m0 + q1 * m1
            out[2, j] += r0 * m0 + r1 * m1
            out[3, j] += s0 * m0 + s1 * m1


@summing
def _products(m, a, out):  # type: ignore[no-untyped-def]
    """out [4, C] = a mᵀ, for a [4, width]."""
    for c in range(m.shape[0]):
        p = q = r = s = f32(0.0)
        for j in range(a.shape[1]):
            x = m[c, j]
            p += x * a[0, j]
            q += x * a[1, j]
            r += x * a[2, j]
            s += x * a[3, j]
        out[0, c], out[1, c], out[2, c], out[3, c] = p, q, r, s


@inline
def _add_outer(f, a, total):  # type: ignore[no-untyped-def]
    """total [C, width] += fᵀ a, for four rows f [4, C] and a [4, width]."""
    for c in range(total.shape[0]):
        p, q, r, s = f[0, c], f[1, c], f[2, c], f[3, c]
        for j in range(total.shape[1]):
            total[c, j] += p * a[0, j] + q * a[1, j] + r * a[2, j] + s * a[3, j]


@inline
def _take(x, first, last, out):  # type: ignore[no-untyped-def]
    """Rows first to last of x, four at most, as out [4, .]; zeros where there are fewer."""
    for k in range(4):
        for j in range(out.shape[1]):
            out[k, j] = x[first + k, j] if first + k < last else f32(0.0)
