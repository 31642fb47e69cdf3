"""Rotary positions as one compiled kernel, for queries and keys in the columns of a projection.

Tensors [B, T, heads, E] that are read are given as their memory and a line of strides (`strided`), what is written is
contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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
NOTHING = np.empty(0, dtype=np.float32)


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    results = q.new_empty(*q.shape), k.new_empty(*k.shape)
    rotation_kernel(*strided(q, k), *results, NOTHING, NOTHING, cos, sin, 1.0, NO_FLOOR if floor is None else floor)
    return results


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The opposite rotation."""
    _, _, cos, sin, floor = arguments
    found = [y.new_empty(*((0,) * 4 if grad is None else y.shape)) for grad, y in zip(grads, results, strict=True)]
    features = [NOTHING if floor is None else y.view(-1) for y in results]
    rotation_kernel(*strided(*grads), *found, *features, cos, sin, -1.0, NO_FLOOR if floor is None else floor)
    return *(None if grad is None else x for grad, x in zip(grads, found, strict=True)), None, None


@kernel
def rotation_kernel(q, k, at, out_q, out_k, features_q, features_k, cos, sin, direction, floor):  # type: ignore[no-untyped-def]
    """Rotated forwards or, with the direction -1, back. Nothing for a result that is empty; with features, only what is
    above their floor."""
    for task in prange(-(-max(out_q.shape[0] * out_q.shape[1], out_k.shape[0] * out_k.shape[1]) // TOKENS)):
        _rotate(task * TOKENS, q, at[0], out_q, features_q, cos, sin, f32(direction), f32(floor))
        _rotate(task * TOKENS, k, at[1], out_k, features_k, cos, sin, f32(direction), f32(floor))


@job
def _rotate(first, x, at, out, features, cos, sin, direction, floor):  # type: ignore[no-untyped-def]
    length, heads, y, zero = out.shape[1], out.shape[2], out.reshape(-1), f32(0.0)
    width, seen = u64(out.shape[3]), np.empty(out.shape[3], dtype=f32)
    for row in range(first, min(first + TOKENS, out.shape[0] * length)):
        b, t = row // length, row % length
        c, s = cos[min(b, cos.shape[0] - 1), t], sin[min(b, cos.shape[0] - 1), t]
        for h in range(heads):
            start, to = u64(b * at[0] + t * at[1] + h * at[2]), u64(row * heads + h) * width
            if features.size:
                for i in range(width):
                    grad, feature = x[start + i], features[to + i]
                    seen[i] = grad if feature > floor else zero
                _turn(seen, u64(0), c, s, direction, y, to)
                continue
            _turn(x, start, c, s, direction, y, to)
            if floor >= zero:
                for i in range(width):
                    value = y[to + i]
                    y[to + i] = (zero if value < zero else value) + floor  # written so that NaN propagates


@inline
def _turn(x, start, c, s, direction, y, to):  # type: ignore[no-untyped-def]
    for i in range(u64(c.size)):
        real, imaginary, cos, sin = x[start + TWO * i], x[start + TWO * i + ONE], c[i], direction * s[i]
        y[to + TWO * i] = real * cos - imaginary * sin
        y[to + TWO * i + ONE] = real * sin + imaginary * cos
