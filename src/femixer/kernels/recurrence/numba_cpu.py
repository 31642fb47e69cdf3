"""The linear recurrence as one compiled loop over time for a block of channels at a time."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.numba_kernel import job, kernel

FLOATS = (torch.float32, torch.float64)
LANES = 64  # channels that one thread works on at a time


def forward(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
    h = inputs.new_empty(*inputs.shape)
    forward_kernel(decay, inputs, initial, h)
    return (h,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor, Tensor, bool],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    decay, _, initial, _ = arguments
    gradients = decay.new_empty(*decay.shape), decay.new_empty(*decay.shape), decay.new_empty(*initial.shape)
    backward_kernel(grads[0], decay, results[0], initial, *gradients)
    return gradients


@kernel
def forward_kernel(decay, inputs, initial, h):  # type: ignore[no-untyped-def]
    blocks = (h.shape[2] + LANES - 1) // LANES
    for index in prange(h.shape[0] * blocks):
        _forward(index // blocks, index % blocks * LANES, decay, inputs, initial, h)


@job
def _forward(b, low, decay, inputs, initial, h):  # type: ignore[no-untyped-def]
    n = min(LANES, h.shape[2] - low)
    state = np.zeros(LANES)
    for i in range(n):
        state[i] = initial[b, low + i]
    for t in range(h.shape[1]):
        a, u, out = decay[b, t], inputs[b, t], h[b, t]
        for i in range(n):
            state[i] = state[i] * a[low + i] + u[low + i]
        for i in range(n):
            out[low + i] = state[i]


@kernel
def backward_kernel(grad, decay, h, initial, d_decay, d_inputs, d_initial):  # type: ignore[no-untyped-def]
    blocks = (h.shape[2] + LANES - 1) // LANES
    for index in prange(h.shape[0] * blocks):
        _backward(index // blocks, index % blocks * LANES, grad, decay, h, initial, d_decay, d_inputs, d_initial)


@job
def _backward(b, low, grad, decay, h, initial, d_decay, d_inputs, d_initial):  # type: ignore[no-untyped-def]
    """e_t = grad_t + decay_{t+1} e_{t+1};  d input = e, d decay_t = e_t h_{t-1}."""
    length, n = h.shape[1], min(LANES, h.shape[2] - low)
    error = np.zeros(LANES)
    for u in range(length):
        t = length - 1 - u
        g, a, out = grad[b, t], decay[b, t], d_inputs[b, t]
        before = h[b, t - 1] if t > 0 else initial[b]
        for i in range(n):
            error[i] += g[low + i]
        for i in range(n):
            out[low + i] = error[i]
        out = d_decay[b, t]
        for i in range(n):
            out[low + i] = error[i] * before[low + i]
        for i in range(n):
            error[i] *= a[low + i]
    for i in range(n):
        d_initial[b, low + i] = error[i]
