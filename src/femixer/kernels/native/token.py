"""Compiled kernels for one token at a time, float32: what would be dozens of tiny calls of torch is one each.

Rows are the sequences of a batch. What is computed is in `femixer.conditioner`, `femixer.projection` and
`femixer.rotary`.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from femixer.kernels.native.primitives import MATH, f32

token = numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", cache=True, nogil=True)


@token
def condition(x, weight, bias, state, eps, features, new_state):  # type: ignore[no-untyped-def]
    """x [B, dim]; weight [3 C, dim]; bias [3 C]; state [B, C] -> features, new_state [B, C]."""
    channels = state.shape[1]
    y = np.empty(3 * channels)
    for b in range(x.shape[0]):
        mean, scale = _moments(x, b, eps)
        for j in range(3 * channels):
            # W LN(x) = (W x - mean W 1) scale
            product, whole = _product(weight, j, x, b)
            y[j] = (product - mean * whole) * scale + bias[j]
        square, total, squares = 0.0, 0.0, 0.0
        for c in range(channels):
            h = state[b, c] / (1.0 + math.exp(y[c])) + y[channels + c]
            a = y[2 * channels + c]
            a = max(a, 0.0) + math.log1p(math.exp(-abs(a)))
            new_state[b, c] = h
            y[c], y[channels + c] = a, h
            square += a * a
            total += h
        length = max(math.sqrt(square), 1e-12)
        middle = total / channels
        for c in range(channels):
            squares += (y[channels + c] - middle) ** 2
        spread = 1.0 / math.sqrt(squares / channels + 1e-5)
        for c in range(channels):
            a = y[c] / length
            features[b, c] = a / (1.0 + math.exp(-a)) * (y[channels + c] - middle) * spread


@token
def _moments(x, b, eps):  # type: ignore[no-untyped-def]
    """Mean, and one over the standard deviation."""
    total, squares = 0.0, 0.0
    for i in range(x.shape[1]):
        total += x[b, i]
    mean = total / x.shape[1]
    for i in range(x.shape[1]):
        squares += (x[b, i] - mean) ** 2
    return mean, 1.0 / math.sqrt(squares / x.shape[1] + eps)


@token
def _product(weight, j, x, b):  # type: ignore[no-untyped-def]
    """sum_i w_ji x_i and sum_i w_ji"""
    product, whole = 0.0, 0.0
    for i in range(x.shape[1]):
        product += np.float64(weight[j, i]) * x[b, i]
    for i in range(x.shape[1]):
        whole += weight[j, i]
    return product, whole


@token
def modulate(x, features, matrix, scaled):  # type: ignore[no-untyped-def]
    """x [B, columns] in place: times 1 + eta in the first `scaled` columns, plus eta in others; eta = features Mᵀ."""
    channels = features.shape[1]
    for b in range(x.shape[0]):
        for j in range(x.shape[1]):
            eta = f32(0.0)
            for c in range(channels):
                eta += features[b, c] * matrix[j, c]
            x[b, j] = x[b, j] * (f32(1.0) + eta) if j < scaled else x[b, j] + eta


@token
def rotate(x, heads, position, base, out):  # type: ignore[no-untyped-def]
    """x [B, columns], of which the first heads * E are rotated -> out [B, heads, E]; position [B or 1, 1]."""
    width = out.shape[2]
    cos, sin = np.empty(width // 2), np.empty(width // 2)
    for b in range(x.shape[0]):
        if b < position.shape[0]:
            for i in range(width // 2):
                angle = position[b, 0] * base ** (-2.0 * i / width)
                cos[i], sin[i] = math.cos(angle), math.sin(angle)
        for h in range(heads):
            for i in range(width // 2):
                real, imaginary = x[b, h * width + 2 * i], x[b, h * width + 2 * i + 1]
                out[b, h, 2 * i] = real * cos[i] - imaginary * sin[i]
                out[b, h, 2 * i + 1] = real * sin[i] + imaginary * cos[i]
