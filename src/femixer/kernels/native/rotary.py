"""Compiled kernels of `femixer.rotary`: heads turned by the angles of their positions, float32.

Features of linear attention are max(., 0) + floor of what is turned, never negative. Tensors [B, T, heads, E] are given
as their memory and a line of strides (backend.memory); cos and sin are [B or 1, T, E / 2]. Channels (2 i, 2 i + 1) are
a pair.
"""

from __future__ import annotations

from numba import prange

from femixer.kernels.native.primitives import f32, inline, job, kernel, u64

# Tokens of a task.
TOKENS = 32
ONE, TWO = u64(1), u64(2)


@kernel
def forward(x, out, at, shape, cos, sin, floor):  # type: ignore[no-untyped-def]
    for task in prange(-(-shape[0] * shape[1] // TOKENS)):
        _forward(task * TOKENS, x, out, at, shape, cos, sin, f32(floor))


@job
def _forward(first, x, out, at, shape, cos, sin, floor):  # type: ignore[no-untyped-def]
    length = shape[1]
    for row in range(first, min(first + TOKENS, shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(shape[2]):
            start, to = _start(at, 0, b, t, h), _start(at, 1, b, t, h)
            for i in range(u64(c.size)):
                real, imaginary = x[start + TWO * i], x[start + TWO * i + ONE]
                out[to + TWO * i] = _positive(real * c[i] - imaginary * s[i]) + floor
                out[to + TWO * i + ONE] = _positive(real * s[i] + imaginary * c[i]) + floor


@kernel
def backward(grad, features, out, at, shape, cos, sin, floor):  # type: ignore[no-untyped-def]
    """The gradient of x from that of its features."""
    for task in prange(-(-shape[0] * shape[1] // TOKENS)):
        _backward(task * TOKENS, grad, features, out, at, shape, cos, sin, f32(floor))


@job
def _backward(first, grad, features, out, at, shape, cos, sin, floor):  # type: ignore[no-untyped-def]
    length, zero = shape[1], f32(0.0)
    for row in range(first, min(first + TOKENS, shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(shape[2]):
            start, of, to = _start(at, 0, b, t, h), _start(at, 1, b, t, h), _start(at, 2, b, t, h)
            for i in range(u64(c.size)):
                real, imaginary = grad[start + TWO * i], grad[start + TWO * i + ONE]
                first_seen, second_seen = features[of + TWO * i] > floor, features[of + TWO * i + ONE] > floor
                real, imaginary = real if first_seen else zero, imaginary if second_seen else zero
                out[to + TWO * i] = real * c[i] + imaginary * s[i]
                out[to + TWO * i + ONE] = imaginary * c[i] - real * s[i]


@kernel
def modulate(x, eta, first, scaled, cos, sin, floor):  # type: ignore[no-untyped-def]
    """Rows x [n, width] in place: times 1 + eta and turned in the first `scaled` columns, plus eta in the others.

    The first row is the token `first` of all sequences, one after the other. floor: negative for none.
    """
    for task in prange(-(-x.shape[0] // TOKENS)):
        _modulate(task * TOKENS, x, eta, first, scaled, cos, sin, f32(floor))


@job
def _modulate(begin, x, eta, first, scaled, cos, sin, floor):  # type: ignore[no-untyped-def]
    y, more, width = x.reshape(-1), eta.reshape(-1), u64(x.shape[1])
    for row in range(begin, min(begin + TOKENS, x.shape[0])):
        b, t = (first + row) // cos.shape[1], (first + row) % cos.shape[1]
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        start, pairs = u64(row) * width, u64(c.size)
        for at in range(start, start + u64(scaled), TWO * pairs):
            for i in range(pairs):
                j = at + TWO * i
                real, imaginary = y[j] + y[j] * more[j], y[j + ONE] + y[j + ONE] * more[j + ONE]
                y[j] = real * c[i] - imaginary * s[i]
                y[j + ONE] = real * s[i] + imaginary * c[i]
        if floor >= f32(0.0):
            for j in range(start, start + u64(scaled)):
                y[j] = _positive(y[j]) + floor
        for j in range(start + u64(scaled), start + width):
            y[j] += more[j]


@inline
def _positive(x):  # type: ignore[no-untyped-def]
    """max(x, 0); what is not a number stays that."""
    return f32(0.0) if x < f32(0.0) else x


@inline
def _start(at, line, b, t, h):  # type: ignore[no-untyped-def]
    """Where a token's head begins in memory."""
    return u64(b * at[line, 0] + t * at[line, 1] + h * at[line, 2])
