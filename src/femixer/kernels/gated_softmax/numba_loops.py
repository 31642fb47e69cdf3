"""Compiled loops of `femixer.kernels.gated_softmax`, float32: what `streams` and `gates` do, a sequence at a time.

What one step leaves in the cache is there for the next, and there are fewer calls. Tensors [B, T, H, .] that are read
are given as their memory and lines of strides (`arrays.strided`); what is written is contiguous. shift [3, B, H, D]:
bottom, top and base of each channel.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from femixer.kernels.gates.numba_loops import (
    ABOVE,
    FREE,
    GATE,
    GRAD,
    LAM,
    MEAN,
    POSITIVE,
    READ,
    SHARE,
    SLOPE,
    divide,
    gate_tokens,
    parts_of,
    row_of,
    slopes_of,
    through_gate,
)
from femixer.kernels.numba_math import f32, job, kernel, u64
from femixer.kernels.streams.numba_loops import (
    TOKENS,
    settle_tokens,
    span_of,
    streams_of,
    stretches,
    through_tokens,
    unite,
)


@kernel
def forward_streams(v, at, beta, narrow, shift, streams):  # type: ignore[no-untyped-def]
    """The shift of v, and its streams [B, T, H, 2 D]."""
    for b in prange(streams.shape[0]):
        _forward_streams(b, v, at, beta, narrow, shift, streams)


@job
def _forward_streams(b, v, at, beta, narrow, shift, streams):  # type: ignore[no-untyped-def]
    length, parts = streams.shape[1], stretches(streams.shape[1])
    heads, channels = shift.shape[2:]
    low, high = np.empty((parts, heads, channels), dtype=f32), np.empty((parts, heads, channels), dtype=f32)
    for part in range(parts):
        span_of(b, part * TOKENS, v, at, length, low[part], high[part])
    unite(low, high, beta, f32(narrow), shift[0, b], shift[1, b], shift[2, b])
    for part in range(parts):
        streams_of(b, part * TOKENS, v, at, beta, shift[1], shift[2], streams)


@kernel
def forward(sums, lam, gate, at, beta, shift, limits, eps, doubtful, free, out):  # type: ignore[no-untyped-def]
    """From the sums (mu | total - base) to F and to the gated read `out`, [B, T, H, D] each."""
    lines = _with_contiguous(at, out.shape)
    for b in prange(out.shape[0]):
        _forward(b, sums, free.reshape(-1), lam, gate, lines, beta, shift, limits, f32(eps), doubtful[b], out)


@job
def _forward(b, sums, free, lam, gate, at, beta, shift, limits, eps, doubtful, out):  # type: ignore[no-untyped-def]
    length, (bottom, top, base) = out.shape[1], (shift[0, b], shift[1, b], shift[2, b])
    for first in range(0, length, TOKENS):
        settle_tokens(b, first, sums, free, at, out.shape, beta, bottom, top, base, limits, doubtful)
        gate_tokens(b * length + first, min(TOKENS, length - first), sums, free, lam, gate, at, eps, out)


@job
def _with_contiguous(at, shape):  # type: ignore[no-untyped-def]
    """The lines of sums, lam and gate in their places for `gates`, with those of contiguous F and gradient."""
    lines = np.empty((5, 3), dtype=np.int64)
    lines[MEAN], lines[LAM], lines[GATE] = at[0], at[1], at[2]
    for line in (FREE, GRAD):
        lines[line, 0], lines[line, 1], lines[line, 2] = shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]
    return lines


@kernel
def backward(sums, lam, gate, at, free, grad, beta, shift, eps, inner, to_lam, to_gate, d_beta):  # type: ignore[no-untyped-def]
    """From the gradient of the gated read to that of the sums, `inner`, of lam and gate, and what the logarithm gives
    to beta [B, H, D], to which `backward_streams` adds."""
    lines = _with_contiguous(at, to_lam.shape)
    for b in prange(inner.shape[0]):
        _backward(
            b,
            sums,
            free.reshape(-1),
            lam,
            gate,
            grad.reshape(-1),
            lines,
            beta,
            shift,
            f32(eps),
            inner,
            to_lam,
            to_gate,
            d_beta[b],
        )


@job
def _backward(b, sums, free, lam, gate, grad, at, beta, shift, eps, inner, to_lam, to_gate, d_beta):  # type: ignore[no-untyped-def]
    length, width = to_lam.shape[1], to_lam.shape[2] * to_lam.shape[3]
    r = np.empty((ABOVE + 1, TOKENS * width), dtype=f32)
    to_mean, to_free = np.empty(TOKENS * width, dtype=f32), np.empty(TOKENS * width, dtype=f32)
    by_lam, by_gate = to_lam.reshape(-1), to_gate.reshape(-1)
    d_beta[:] = f32(0.0)
    for first in range(0, length, TOKENS):
        count, token = min(TOKENS, length - first), b * length + first
        n, part = count * width, slice(token * width, (token + count) * width)
        mean = row_of(sums, MEAN, token, count, to_lam, at, r)
        energy = row_of(free, FREE, token, count, to_lam, at, r)
        logits = row_of(lam, LAM, token, count, to_lam, at, r)
        parts_of(mean, energy, logits, r[SHARE], r[ABOVE], r[READ, :n])
        slopes_of(row_of(gate, GATE, token, count, to_lam, at, r), r[POSITIVE, :n], r[SLOPE])
        by = row_of(grad, GRAD, token, count, to_lam, at, r)
        through_gate(r[READ, :n], r[POSITIVE], r[SLOPE], by, to_lam.shape[3], eps, by_gate[part], to_mean)
        divide(r[SHARE], r[ABOVE], to_mean[:n], to_free, by_lam[part])
        _through_logarithm(b, first, count, to_mean, to_free, sums, energy, at, beta, shift, inner, d_beta)


@job
def _through_logarithm(b, first, count, to_mean, to_free, sums, free, at, beta, shift, inner, d_beta):  # type: ignore[no-untyped-def]
    """F = top + log(total) / beta: dF/dtotal = 1 / (beta total), dF/dbeta = -(F - top) / beta. to_mean, to_free, free:
    rows of these tokens."""
    n, x, at_row = u64(beta.shape[1]), inner.reshape(-1), u64(0)
    top, base = shift[1, b], shift[2, b]
    slope = np.empty(beta.shape[1], dtype=f32)
    for t in range(first, first + count):
        for h in range(beta.shape[0]):
            to = u64(((b * inner.shape[1] + t) * inner.shape[2] + h) * inner.shape[3])
            total = u64(b * at[MEAN, 0] + t * at[MEAN, 1] + h * at[MEAN, 2]) + n
            for d in range(n):
                x[to + d] = to_mean[at_row + d]
            for d in range(n):
                slope[d] = to_free[at_row + d] / beta[h, d]
            for d in range(n):
                d_beta[h, d] -= slope[d] * (free[at_row + d] - top[h, d])
            for d in range(n):
                x[to + n + d] = slope[d] / (sums[total + d] + base[h, d])
            at_row += n


@kernel
def backward_streams(to_streams, streams, v, at, beta, shift, d_v, d_beta):  # type: ignore[no-untyped-def]
    """From the gradients of the streams to those of v; what the exponentials give to beta is added."""
    for b in prange(d_v.shape[0]):
        _backward_streams(b, to_streams, streams, v, at, beta, shift, d_v, d_beta[b])


@job
def _backward_streams(b, to_streams, streams, v, at, beta, shift, d_v, d_beta):  # type: ignore[no-untyped-def]
    here = np.empty(d_beta.shape, dtype=f32)
    for first in range(0, d_v.shape[1], TOKENS):
        through_tokens(b, first, to_streams, streams, v, at, beta, shift[1], shift[2], d_v, here)
        d_beta += here
