"""Products of rows with a matrix m [C, width] of few rows, for compiled kernels, float32.

Rows of m are taken four at a time: then a number is loaded and stored once for four products.
"""

from __future__ import annotations

from femixer.kernels.native.primitives import f32, inline, summing


@inline
def combine(f, row, m, out):  # type: ignore[no-untyped-def]
    """out [width] = f[row] m, for f [n, C]."""
    fours = m.shape[0] - m.shape[0] % 4
    for j in range(out.size):
        out[j] = f32(0.0)
    for c in range(0, fours, 4):
        f0, f1, f2, f3 = f[row, c], f[row, c + 1], f[row, c + 2], f[row, c + 3]
        for j in range(out.size):
            out[j] += f0 * m[c, j] + f1 * m[c + 1, j] + f2 * m[c + 2, j] + f3 * m[c + 3, j]
    for c in range(fours, m.shape[0]):
        f0 = f[row, c]
        for j in range(out.size):
            out[j] += f0 * m[c, j]


@summing
def products(m, a, k, out, row):  # type: ignore[no-untyped-def]
    """out[row] = m a[k], for a [., width] and out [n, C]."""
    fours = m.shape[0] - m.shape[0] % 4
    for c in range(0, fours, 4):
        s0, s1, s2, s3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        for j in range(a.shape[1]):
            s0 += m[c, j] * a[k, j]
            s1 += m[c + 1, j] * a[k, j]
            s2 += m[c + 2, j] * a[k, j]
            s3 += m[c + 3, j] * a[k, j]
        out[row, c], out[row, c + 1], out[row, c + 2], out[row, c + 3] = s0, s1, s2, s3
    for c in range(fours, m.shape[0]):
        s0 = f32(0.0)
        for j in range(a.shape[1]):
            s0 += m[c, j] * a[k, j]
        out[row, c] = s0


@inline
def add_outer(f, a, total):  # type: ignore[no-untyped-def]
    """total [C, width] += fᵀ a, for four rows f [4, C] and a [4, width]."""
    for c in range(total.shape[0]):
        f0, f1, f2, f3 = f[0, c], f[1, c], f[2, c], f[3, c]
        for j in range(total.shape[1]):
            total[c, j] += f0 * a[0, j] + f1 * a[1, j] + f2 * a[2, j] + f3 * a[3, j]
