"""The gates of a read as one compiled kernel each way, in one pass over memory.

Every tensor [B, T, H, D] is given as its memory from its first element on, a line of `at` [., 3] with its strides along
batch, tokens and heads; the channels of a head lie side by side. Empty arrays stand for nothing: no temperature, no
gate.

A task is some tokens. What it reads of a tensor is one row of numbers, gathered where it is not one in memory: loops
are then long whatever the width of a head. Each loop is a function of its own, which the compiler vectorises.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.numba_kernel import inline, job, kernel, strided, summing, u64
from femixer.kernels.numba_math import f32, sigmoid32, softplus32, softplus_slope32

FLOATS = (torch.float32,)
READS_RESULTS = False
# Lines of `at`, and the rows of the scratch array where what is read is gathered.
MEAN, FREE, LAM, GATE, GRAD = range(5)
# Its other rows: the read; softplus of the gate's logits and its slope; sigmoid of lam, and free less mean.
READ, POSITIVE, SLOPE, SHARE, ABOVE = range(5, 10)
# Numbers of a task.
NUMBERS = 2048


def forward(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    for x in (mean, free, lam, gate):
        if x is not None and (x.dim() != 4 or x.shape != mean.shape):
            raise ValueError(f"gates take tensors [B, T, H, D] of one shape, not {tuple(x.shape)}")
    out = mean.new_empty(*mean.shape)
    forward_kernel(*strided(mean, free, lam, gate), eps, out)
    return (out,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    mean, free, lam, gate, eps = arguments
    # The loops take empty arrays for what is not there.
    results = [mean.new_empty(*(mean.shape if x is not None else (0,) * 4)) for x in (mean, free, lam, gate)]
    backward_kernel(*strided(mean, free, lam, gate, grads[0]), eps, *results)
    return tuple(None if x is None else to_x for x, to_x in zip(arguments[:4], results, strict=True))


@kernel
def forward_kernel(mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    """out [B, T, H, D] = softplus(gate) / rms * ((1 - sigmoid(lam)) mean + sigmoid(lam) free)."""
    step = _tokens(out)
    for task in prange(-(-out.shape[0] * out.shape[1] // step)):
        gate_tokens(task * step, step, mean, free, lam, gate, at, f32(eps), out)


@job
def gate_tokens(first, step, mean, free, lam, gate, at, eps, out):  # type: ignore[no-untyped-def]
    count = min(step, out.shape[0] * out.shape[1] - first)
    y = _part(out, out, first, count)
    r = np.empty((POSITIVE + 1, y.size), dtype=f32)
    mu = row_of(mean, MEAN, first, count, out, at, r)
    if lam.size:
        _mix(mu, row_of(free, FREE, first, count, out, at, r), row_of(lam, LAM, first, count, out, at, r), y)
    else:
        y[:] = mu
    if gate.size:
        _softplus(row_of(gate, GATE, first, count, out, at, r), r[POSITIVE])
        _scale(r[POSITIVE], out.shape[3], eps, y)


@job
def _mix(mean, free, lam, y):  # type: ignore[no-untyped-def]
    for i in range(u64(y.size)):
        y[i] = mean[i] + sigmoid32(lam[i]) * (free[i] - mean[i])


@job
def _softplus(x, y):  # type: ignore[no-untyped-def]
    for i in range(u64(y.size)):
        y[i] = softplus32(x[i])


@summing
def _scale(positive, channels, eps, y):  # type: ignore[no-untyped-def]
    """y times the positive numbers of each head, which are brought to a root mean square of 1."""
    n = u64(channels)
    for start in range(u64(0), u64(y.size), n):
        total = f32(0.0)
        for i in range(n):
            total += positive[start + i] * positive[start + i]
        scale = f32(1.0) / math.sqrt(total / f32(n) + eps)
        for i in range(n):
            y[start + i] *= positive[start + i] * scale


@kernel
def backward_kernel(mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    """The gradients of `forward` for its arguments, [B, T, H, D] each."""
    step = _tokens(to_mean)
    for task in prange(-(-to_mean.shape[0] * to_mean.shape[1] // step)):
        _backward(task * step, step, mean, free, lam, gate, grad, at, f32(eps), to_mean, to_free, to_lam, to_gate)


@job
def _backward(first, step, mean, free, lam, gate, grad, at, eps, to_mean, to_free, to_lam, to_gate):  # type: ignore[no-untyped-def]
    count = min(step, to_mean.shape[0] * to_mean.shape[1] - first)
    to_read = _part(to_mean, to_mean, first, count)
    r = np.empty((ABOVE + 1, to_read.size), dtype=f32)
    read = row_of(mean, MEAN, first, count, to_mean, at, r)
    if lam.size:
        logits = row_of(lam, LAM, first, count, to_mean, at, r)
        parts_of(read, row_of(free, FREE, first, count, to_mean, at, r), logits, r[SHARE], r[ABOVE], r[READ])
        read = r[READ]
    by = row_of(grad, GRAD, first, count, to_mean, at, r)
    if gate.size:
        slopes_of(row_of(gate, GATE, first, count, to_mean, at, r), r[POSITIVE], r[SLOPE])
        d_gate = _part(to_gate, to_mean, first, count)
        through_gate(read, r[POSITIVE], r[SLOPE], by, to_mean.shape[3], eps, d_gate, to_read)
    else:
        to_read[:] = by
    if lam.size:
        d_free, d_lam = _part(to_free, to_mean, first, count), _part(to_lam, to_mean, first, count)
        divide(r[SHARE], r[ABOVE], to_read, d_free, d_lam)


@job
def parts_of(mean, free, lam, share, above, read):  # type: ignore[no-untyped-def]
    for i in range(u64(read.size)):
        share[i] = sigmoid32(lam[i])
        above[i] = free[i] - mean[i]
        read[i] = mean[i] + share[i] * above[i]


@job
def slopes_of(x, y, slope):  # type: ignore[no-untyped-def]
    for i in range(u64(y.size)):
        y[i], slope[i] = softplus_slope32(x[i])


@job
def divide(share, above, to_read, to_free, to_lam):  # type: ignore[no-untyped-def]
    """From the gradient of the read to those of mean, in its place, free and lam."""
    for i in range(u64(to_read.size)):
        to_free[i] = to_read[i] * share[i]
        to_read[i] -= to_free[i]
        to_lam[i] = above[i] * to_read[i] * share[i]


@summing
def through_gate(read, positive, slope, grad, channels, eps, to_gate, to_read):  # type: ignore[no-untyped-def]
    """The gradients of the logits and of the read.

    d g / d positive = scale (1 - g gᵀ / D): the norm takes out what points along g.
    """
    n = u64(channels)
    for start in range(u64(0), u64(read.size), n):
        total = along = f32(0.0)
        for i in range(n):
            p = positive[start + i]
            total += p * p
            along += p * (read[start + i] * grad[start + i])
        scale = f32(1.0) / math.sqrt(total / f32(n) + eps)
        along *= scale * scale / f32(n)
        for i in range(n):
            p, g = positive[start + i], grad[start + i]
            to_gate[start + i] = slope[start + i] * scale * (read[start + i] * g - p * along)
            to_read[start + i] = g * scale * p


@job
def _tokens(like):  # type: ignore[no-untyped-def]
    return max(1, NUMBERS // max(1, like.shape[2] * like.shape[3]))


@inline
def _part(x, like, first, count):  # type: ignore[no-untyped-def]
    """Some tokens of a contiguous tensor, which has the shape of `like`, as a row."""
    width = like.shape[2] * like.shape[3]
    return x.reshape(-1)[first * width : (first + count) * width]


@inline
def row_of(x, line, first, count, like, at, r):  # type: ignore[no-untyped-def]
    """The same of any tensor; what is not a row in memory is gathered in r[line]."""
    length, heads, size = like.shape[1], like.shape[2], like.shape[3]
    b, t = first // length, first % length
    if at[line, 2] == size or heads == 1:  # heads lie side by side too
        heads, size = 1, heads * size
        if (at[line, 1] == size and t + count <= length) or count == 1:  # and tokens
            start = b * at[line, 0] + t * at[line, 1]
            return x[start : start + count * size]
    row, to, n = r[line], u64(0), u64(size)
    for _ in range(count):
        for h in range(heads):
            start = u64(b * at[line, 0] + t * at[line, 1] + h * at[line, 2])
            for i in range(n):
                row[to + i] = x[start + i]
            to += n
        t += 1
        if t == length:
            b, t = b + 1, 0
    return row
