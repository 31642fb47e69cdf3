"""Compiled loops of the rotation, float32.

Tensors [B, T, heads, E] that are read are given as their memory and a line of strides (arrays.strided), what is written
is contiguous; cos and sin are [B or 1, T, E / 2]. A negative floor stands for none.
"""

from numba import prange

from femixer.kernels.numba_math import f32, inline, job, kernel, u64

# Tokens of a task.
TOKENS = 32
ONE, TWO = u64(1), u64(2)


@kernel
def forward(x, at, out, cos, sin, floor):  # type: ignore[no-untyped-def]
    for task in prange(-(-out.shape[0] * out.shape[1] // TOKENS)):
        _forward(task * TOKENS, x, at, out, cos, sin, f32(floor))


@job
def _forward(first, x, at, out, cos, sin, floor):  # type: ignore[no-untyped-def]
    length, heads, y = out.shape[1], out.shape[2], out.reshape(-1)
    for row in range(first, min(first + TOKENS, out.shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(heads):
            start, to = _start(at, 0, b, t, h), u64((row * heads + h) * out.shape[3])
            if floor < f32(0.0):
                for i in range(u64(c.size)):
                    real, imaginary = x[start + TWO * i], x[start + TWO * i + ONE]
                    y[to + TWO * i] = real * c[i] - imaginary * s[i]
                    y[to + TWO * i + ONE] = real * s[i] + imaginary * c[i]
            else:
                for i in range(u64(c.size)):
                    real, imaginary = x[start + TWO * i], x[start + TWO * i + ONE]
                    y[to + TWO * i] = _positive(real * c[i] - imaginary * s[i]) + floor
                    y[to + TWO * i + ONE] = _positive(real * s[i] + imaginary * c[i]) + floor


@kernel
def backward(grad, features, at, out, cos, sin, floor):  # type: ignore[no-untyped-def]
    """The gradient of x from that of its features."""
    for task in prange(-(-out.shape[0] * out.shape[1] // TOKENS)):
        _backward(task * TOKENS, grad, features, at, out, cos, sin, f32(floor))


@job
def _backward(first, grad, features, at, out, cos, sin, floor):  # type: ignore[no-untyped-def]
    length, heads, y, zero = out.shape[1], out.shape[2], out.reshape(-1), f32(0.0)
    for row in range(first, min(first + TOKENS, out.shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(heads):
            start, of, to = _start(at, 0, b, t, h), _start(at, 1, b, t, h), u64((row * heads + h) * out.shape[3])
            if floor < zero:
                for i in range(u64(c.size)):
                    real, imaginary = grad[start + TWO * i], grad[start + TWO * i + ONE]
                    y[to + TWO * i] = real * c[i] + imaginary * s[i]
                    y[to + TWO * i + ONE] = imaginary * c[i] - real * s[i]
            else:
                for i in range(u64(c.size)):
                    real, imaginary = grad[start + TWO * i], grad[start + TWO * i + ONE]
                    first_seen, second_seen = features[of + TWO * i] > floor, features[of + TWO * i + ONE] > floor
                    real, imaginary = real if first_seen else zero, imaginary if second_seen else zero
                    y[to + TWO * i] = real * c[i] + imaginary * s[i]
                    y[to + TWO * i + ONE] = imaginary * c[i] - real * s[i]


@inline
def _positive(x):  # type: ignore[no-untyped-def]
    """max(x, 0), written so that NaN propagates."""
    return f32(0.0) if x < f32(0.0) else x


@inline
def _start(at, line, b, t, h):  # type: ignore[no-untyped-def]
    """Where a token's head begins in memory."""
    return u64(b * at[line, 0] + t * at[line, 1] + h * at[line, 2])
