"""Products of rows with a matrix m [C, width] of few rows, for compiled kernels, float32.

Rows are taken four at a time, on both sides: then a number is loaded and stored once for sixteen products.
"""

from femixer.kernels.numba_kernel import inline, summing
from femixer.kernels.numba_math import f32


@inline
def combine(f, m, out):  # type: ignore[no-untyped-def]
    """out [4, width] = f m, for f [4, C]."""
    first = m.shape[0] % 2
    for j in range(out.shape[1]):
        if first:
            m0 = m[0, j]
            out[0, j], out[1, j], out[2, j], out[3, j] = f[0, 0] * m0, f[1, 0] * m0, f[2, 0] * m0, f[3, 0] * m0
        else:
            out[0, j] = out[1, j] = out[2, j] = out[3, j] = f32(0.0)
    if (m.shape[0] - first) % 4:
        _combine_two(f, m, first, out)
        first += 2
    for c in range(first, m.shape[0], 4):
        p0, p1, p2, p3 = f[0, c], f[0, c + 1], f[0, c + 2], f[0, c + 3]
        q0, q1, q2, q3 = f[1, c], f[1, c + 1], f[1, c + 2], f[1, c + 3]
        r0, r1, r2, r3 = f[2, c], f[2, c + 1], f[2, c + 2], f[2, c + 3]
        s0, s1, s2, s3 = f[3, c], f[3, c + 1], f[3, c + 2], f[3, c + 3]
        for j in range(out.shape[1]):
            m0, m1, m2, m3 = m[c, j], m[c + 1, j], m[c + 2, j], m[c + 3, j]
            out[0, j] += p0 * m0 + p1 * m1 + p2 * m2 + p3 * m3
            out[1, j] += q0 * m0 + q1 * m1 + q2 * m2 + q3 * m3
            out[2, j] += r0 * m0 + r1 * m1 + r2 * m2 + r3 * m3
            out[3, j] += s0 * m0 + s1 * m1 + s2 * m2 + s3 * m3


@inline
def _combine_two(f, m, c, out):  # type: ignore[no-untyped-def]
    p0, p1, q0, q1 = f[0, c], f[0, c + 1], f[1, c], f[1, c + 1]
    r0, r1, s0, s1 = f[2, c], f[2, c + 1], f[3, c], f[3, c + 1]
    for j in range(out.shape[1]):
        m0, m1 = m[c, j], m[c + 1, j]
        out[0, j] += p0 * m0 + p1 * m1
        out[1, j] += q0 * m0 + q1 * m1
        out[2, j] += r0 * m0 + r1 * m1
        out[3, j] += s0 * m0 + s1 * m1


@summing
def products(m, a, out):  # type: ignore[no-untyped-def]
    """out [4, C] = a mᵀ, for a [4, width]."""
    for c in range(0, m.shape[0] - 1, 2):
        p0, q0, r0, s0 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        p1, q1, r1, s1 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        for j in range(a.shape[1]):
            m0, m1 = m[c, j], m[c + 1, j]
            p0 += m0 * a[0, j]
            q0 += m0 * a[1, j]
            r0 += m0 * a[2, j]
            s0 += m0 * a[3, j]
            p1 += m1 * a[0, j]
            q1 += m1 * a[1, j]
            r1 += m1 * a[2, j]
            s1 += m1 * a[3, j]
        out[0, c], out[1, c], out[2, c], out[3, c] = p0, q0, r0, s0
        out[0, c + 1], out[1, c + 1], out[2, c + 1], out[3, c + 1] = p1, q1, r1, s1
    if m.shape[0] % 2:
        c = m.shape[0] - 1
        p0, q0, r0, s0 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        for j in range(a.shape[1]):
            p0 += m[c, j] * a[0, j]
            q0 += m[c, j] * a[1, j]
            r0 += m[c, j] * a[2, j]
            s0 += m[c, j] * a[3, j]
        out[0, c], out[1, c], out[2, c], out[3, c] = p0, q0, r0, s0


@inline
def add_outer(f, a, total):  # type: ignore[no-untyped-def]
    """total [C, width] += fᵀ a, for four rows f [4, C] and a [4, width]."""
    for c in range(0, total.shape[0] - 1, 2):
        p0, q0, r0, s0 = f[0, c], f[1, c], f[2, c], f[3, c]
        p1, q1, r1, s1 = f[0, c + 1], f[1, c + 1], f[2, c + 1], f[3, c + 1]
        for j in range(total.shape[1]):
            total[c, j] += p0 * a[0, j] + q0 * a[1, j] + r0 * a[2, j] + s0 * a[3, j]
            total[c + 1, j] += p1 * a[0, j] + q1 * a[1, j] + r1 * a[2, j] + s1 * a[3, j]
    if total.shape[0] % 2:
        c = total.shape[0] - 1
        p0, q0, r0, s0 = f[0, c], f[1, c], f[2, c], f[3, c]
        for j in range(total.shape[1]):
            total[c, j] += p0 * a[0, j] + q0 * a[1, j] + r0 * a[2, j] + s0 * a[3, j]


@inline
def take(x, first, last, out):  # type: ignore[no-untyped-def]
    """Rows first to last of x, four at most, as out [4, .]; zeros where there are fewer."""
    for k in range(4):
        for j in range(out.shape[1]):
            out[k, j] = x[first + k, j] if first + k < last else f32(0.0)
