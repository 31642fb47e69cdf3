"""RMS norm as one compiled kernel each way, where torch makes a dozen passes over the memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.numba_kernel import job, kernel, rows, summing_job
from femixer.kernels.numba_math import f32

FLOATS = (torch.float32,)
READS_RESULTS = False
# Rows whose gradients of the weight are summed by one task, and rows of a task of the forward pass.
SUMMED, ROWS = 512, 64


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    out = x.new_empty(*x.shape)
    given, found = rows(x, out)
    forward_kernel(given, weight, eps, found)
    return (out,)


def backward(
    grads: tuple[Tensor, ...], arguments: tuple[Tensor, Tensor, float], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    x, weight, eps = arguments
    to_x = x.new_empty(*x.shape)
    given, grad, found = rows(x, grads[0], to_x)
    to_weight = x.new_empty(-(-given.shape[0] // SUMMED), x.shape[-1])
    backward_kernel(grad, given, weight, eps, found, to_weight)
    return to_x, to_weight.sum(0)


@kernel
def forward_kernel(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """x, out [n, width]; weight [width]."""
    for task in prange(-(-x.shape[0] // ROWS)):
        for row in range(task * ROWS, min((task + 1) * ROWS, x.shape[0])):
            _forward(row, x, weight, eps, out)


@job
def _forward(row, x, weight, eps, out):  # type: ignore[no-untyped-def]
    scale = f32(1.0 / math.sqrt(_dot(x, row, x, row) / x.shape[1] + eps))
    for i in range(weight.size):
        out[row, i] = x[row, i] * scale * weight[i]


@kernel
def backward_kernel(grad, x, weight, eps, to_x, to_weight):  # type: ignore[no-untyped-def]
    """Gradients of x, and those of the weight from the rows of each task, [tasks, width]."""
    for task in prange(to_weight.shape[0]):
        _backward(task, grad, x, weight, eps, to_x, to_weight)


@job
def _backward(task, grad, x, weight, eps, to_x, to_weight):  # type: ignore[no-untyped-def]
    """With z = x / rms: dx = (g w - z mean(g w z)) / rms, dw = sum of g z over rows."""
    width = x.shape[1]
    step = -(-x.shape[0] // to_weight.shape[0])
    through = np.empty((1, width), dtype=f32)
    to_weight[task] = f32(0.0)
    for row in range(task * step, min((task + 1) * step, x.shape[0])):
        scale = f32(1.0 / math.sqrt(_dot(x, row, x, row) / width + eps))
        for i in range(width):
            through[0, i] = grad[row, i] * weight[i]
            to_weight[task, i] += grad[row, i] * x[row, i] * scale
        along = _dot(through, 0, x, row) / f32(width) * scale * scale
        for i in range(width):
            to_x[row, i] = (through[0, i] - x[row, i] * along) * scale


@summing_job
def _dot(a, m, b, n):  # type: ignore[no-untyped-def]
    total = f32(0.0)
    for i in range(a.shape[1]):
        total += a[m, i] * b[n, i]
    return total
