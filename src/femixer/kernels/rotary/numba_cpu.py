"""Rotary positions as one compiled kernel each way, for queries and keys in the columns of a projection.

Tensors [B, T, heads, E] that are read are given as their memory and a line of strides (`strided`), what is written is
contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import prange
from torch import Tensor

from femixer.kernels.numba_kernel import inline, job, kernel, strided, u64
from femixer.kernels.numba_math import f32

FLOATS = (torch.float32,)
READS_ARGUMENTS = ("cos", "sin")
# Floors of features are not negative.
NO_FLOOR = -1.0
# Tokens of a task.
TOKENS = 32
ONE, TWO = u64(1), u64(2)


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    results = q.new_empty(*q.shape), k.new_empty(*k.shape)
    forward_kernel(*strided(q, k), *results, cos, sin, NO_FLOOR if floor is None else floor)
    return results


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    _, _, cos, sin, floor = arguments
    found = [y.new_empty(*((0,) * 4 if grad is None else y.shape)) for grad, y in zip(grads, results, strict=True)]
    backward_kernel(*strided(*grads, *results), *found, cos, sin, NO_FLOOR if floor is None else floor)
    return *(None if grad is None else x for grad, x in zip(grads, found, strict=True)), None, None


@kernel
def forward_kernel(q, k, at, out_q, out_k, cos, sin, floor):  # type: ignore[no-untyped-def]
    for task in prange(-(-out_q.shape[0] * out_q.shape[1] // TOKENS)):
        _forward(task * TOKENS, q, at[0], out_q, cos, sin, f32(floor))
        _forward(task * TOKENS, k, at[1], out_k, cos, sin, f32(floor))


@job
def _forward(first, x, at, out, cos, sin, floor):  # type: ignore[no-untyped-def]
    length, heads, y = out.shape[1], out.shape[2], out.reshape(-1)
    for row in range(first, min(first + TOKENS, out.shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(heads):
            start, to = _start(at, b, t, h), u64((row * heads + h) * out.shape[3])
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
def backward_kernel(to_q, to_k, q, k, at, out_q, out_k, cos, sin, floor):  # type: ignore[no-untyped-def]
    """Gradients from those of the results q and k; nothing for one that is empty."""
    for task in prange(-(-max(out_q.shape[0] * out_q.shape[1], out_k.shape[0] * out_k.shape[1]) // TOKENS)):
        _backward(task * TOKENS, to_q, q, at[0], at[2], out_q, cos, sin, f32(floor))
        _backward(task * TOKENS, to_k, k, at[1], at[3], out_k, cos, sin, f32(floor))


@job
def _backward(first, grad, features, at, features_at, out, cos, sin, floor):  # type: ignore[no-untyped-def]
    length, heads, y, zero = out.shape[1], out.shape[2], out.reshape(-1), f32(0.0)
    for row in range(first, min(first + TOKENS, out.shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(heads):
            start, of, to = _start(at, b, t, h), _start(features_at, b, t, h), u64((row * heads + h) * out.shape[3])
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
def _start(at, b, t, h):  # type: ignore[no-untyped-def]
    """Where a token's head begins in memory."""
    return u64(b * at[0] + t * at[1] + h * at[2])
