"""Compiled kernel of `femixer.kernels.softmax_step`: the read of one query over a cache, float32."""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import prange

from femixer.kernels.native.primitives import MATH, exp32, f32, job, kernel

# Terms that are summed in float32 before they are added to a sum in float64.
BLOCK = 64


@kernel
def read(q, scale, keys, data, shift, beta, seen, limits, mean, free, doubtful):  # type: ignore[no-untyped-def]
    """q [B, G, R, E]; keys [B, G, room, E] and data [B, G, room, D or 2 D], of which `seen` are there; shift
    [B, G, 1, D]; beta [G, D], empty where only the mean is read -> mean, free [B, G, R, D].

    doubtful [B, G]: where a sum, a temperature or the digits of a difference are below or beyond `limits` (least sum,
    least beta, how far below the shift).
    """
    for index in prange(q.shape[0] * q.shape[1]):
        b, g = index // q.shape[1], index % q.shape[1]
        _read(b, g, q, scale, keys, data, shift, beta, seen, limits, mean, free, doubtful)


@job
def _read(b, g, q, scale, keys, data, shift, beta, seen, limits, mean, free, doubtful):  # type: ignore[no-untyped-def]
    heads, width = mean.shape[2], mean.shape[3]
    p = np.empty((heads, seen), dtype=f32)
    whole = np.empty(heads)
    for r in range(heads):
        _scores(b, g, r, q, f32(scale), keys, p)
        whole[r] = _weights(p, r)
    sums = np.zeros((2, heads, width))
    block = np.zeros((BLOCK, width), dtype=f32)
    part = np.empty(width, dtype=f32)
    for start in range(0, seen, BLOCK):
        count = min(BLOCK, seen - start)
        for stream in range(2 if beta.size else 1):
            if stream and data.shape[3] == width:
                _exponentials(b, g, start, count, data, shift, beta, block)
            else:
                _copy(b, g, start, count, data, stream * width, block)
            for r in range(heads):
                _weighted(r, start, count, p, block, part)
                for i in range(width):
                    sums[stream, r, i] += part[i]
    least, cold, far = limits
    bad = False
    for r in range(heads):
        for i in range(width):
            average = sums[0, r, i] / whole[r]
            mean[b, g, r, i] = average
            if beta.size:
                total = sums[1, r, i] / whole[r]
                top = shift[b, g, 0, i]
                value = top + math.log(max(total, least)) / beta[g, i]
                bad |= total < least or beta[g, i] < cold or top - value > far * max(abs(value), 1.0)
                free[b, g, r, i] = max(value, average)
    doubtful[b, g] = bad


@job
def _copy(b, g, start, count, data, low, block):  # type: ignore[no-untyped-def]
    for s in range(count):
        row = data[b, g, start + s, low : low + block.shape[1]]
        for i in range(block.shape[1]):
            block[s, i] = row[i]


@job
def _exponentials(b, g, start, count, data, shift, beta, block):  # type: ignore[no-untyped-def]
    for s in range(count):
        row = data[b, g, start + s]
        for i in range(block.shape[1]):
            block[s, i] = exp32(beta[g, i] * (row[i] - shift[b, g, 0, i]))


@job
def _weighted(r, start, count, p, block, part):  # type: ignore[no-untyped-def]
    """part = sum over s of p[r, start + s] block[s]; four rows at a time, which saves loads and stores of part."""
    part[:] = f32(0.0)
    whole = count // 4 * 4
    for s in range(0, whole, 4):
        w, x, y, z = p[r, start + s], p[r, start + s + 1], p[r, start + s + 2], p[r, start + s + 3]
        for i in range(part.size):
            part[i] += w * block[s, i] + x * block[s + 1, i] + y * block[s + 2, i] + z * block[s + 3, i]
    for s in range(whole, count):
        w = p[r, start + s]
        for i in range(part.size):
            part[i] += w * block[s, i]


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", cache=True, nogil=True)
def _scores(b, g, r, q, scale, keys, p):  # type: ignore[no-untyped-def]
    for s in range(p.shape[1]):
        total = f32(0.0)
        for i in range(q.shape[3]):
            total += q[b, g, r, i] * keys[b, g, s, i]
        p[r, s] = total * scale


@numba.njit(fastmath={*MATH, "reassoc", "nnan"}, error_model="numpy", cache=True, nogil=True)
def _top(p, r):  # type: ignore[no-untyped-def]
    top = p[r, 0]
    for s in range(p.shape[1]):
        top = max(top, p[r, s])
    return top


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", cache=True, nogil=True)
def _weights(p, r):  # type: ignore[no-untyped-def]
    """Scores of a head to weights relative to the largest, in place. Returns their sum."""
    top = _top(p, r)
    for s in range(p.shape[1]):
        p[r, s] = exp32(p[r, s] - top)
    whole = 0.0
    for s in range(p.shape[1]):
        whole += p[r, s]
    return whole
