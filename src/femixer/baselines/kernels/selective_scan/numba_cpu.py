"""The selective scan as one compiled loop over time for a block of channels at a time.

Arrays: rate [N, C]; step, x, y [B, T, C]; write, read [B, T, N]; marks [B, T] (empty: none); state, last [B, N, C];
kept [B, chunks, N, C]: the states before every ROWS-th token, from which the way back starts again.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numba import prange, types
from numba.extending import overload
from torch import Tensor

from femixer.baselines.kernels.selective_scan import ROWS, kept_states
from femixer.kernels.marks import NO_MARKS, PADDING, START
from femixer.kernels.numba_kernel import MATH, job, kernel
from femixer.kernels.numba_math import exp32

FLOATS, ANY, FILLED = (torch.float32, torch.float64), ("state",), True
LANES = 64  # channels that one thread works on at a time


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    rate, step, write, read, x, marks, state = arguments
    state = x.new_zeros(x.shape[0], *rate.shape) if state is None else state.to(x.dtype)
    y, last, kept = x.new_empty(*x.shape), state.new_empty(*state.shape), kept_states(rate, x)
    forward_kernel(rate, step, write, read, x, NO_MARKS if marks is None else marks, state, y, last, kept)
    return y, last, kept


def backward(
    grads: tuple[Tensor, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    rate, step, write, read, x, marks, state = arguments
    to_y, to_last = grads
    d_step, d_x, d_state = x.new_empty(*x.shape), x.new_empty(*x.shape), to_last.new_empty(*to_last.shape)
    d_rate = x.new_empty(x.shape[0], *rate.shape, dtype=torch.float64)
    shares = [x.new_empty(x.shape[0], -(-x.shape[2] // LANES), *write.shape[1:]) for _ in range(2)]
    given = (rate, step, write, read, x, NO_MARKS if marks is None else marks, results[2], to_y, to_last)
    backward_kernel(*given, d_rate, d_step, *shares, d_x, d_state)
    d_write, d_read = (share.sum(1) for share in shares)
    to_state = None if state is None else d_state.to(state.dtype)
    return d_rate.sum(0).to(rate.dtype), d_step, d_write, d_read, d_x, None, to_state


def _exp(x: Any) -> Any:
    """exp(x) for x <= 0, in the dtype of x."""
    raise TypeError("for compiled code only")


@overload(_exp, jit_options={"fastmath": MATH, "error_model": "numpy", "forceinline": True})
def _(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: exp32(x)
    return lambda x: math.exp(x)


@numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", forceinline=True)
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = a.dtype.type(0)
    for i in range(LANES):
        total += a[i] * b[i]
    return total


@job
def _take(source, row, low, n, target):  # type: ignore[no-untyped-def]
    for i in range(n):
        target[i] = source[row, low + i]


@job
def _put(source, target, row, low, n):  # type: ignore[no-untyped-def]
    for i in range(n):
        target[row, low + i] = source[i]


@kernel
def forward_kernel(rate, step, write, read, x, marks, state, y, last, kept):  # type: ignore[no-untyped-def]
    blocks = (x.shape[2] + LANES - 1) // LANES
    for index in prange(x.shape[0] * blocks):
        _forward(
            index // blocks, index % blocks * LANES, rate, step, write, read, x, marks, state, y, last, kept
        )  # fmt: skip


@job
def _forward(b, low, rate, step, write, read, x, marks, state, y, last, kept):  # type: ignore[no-untyped-def]
    n, modes = min(LANES, x.shape[2] - low), rate.shape[0]
    # Lanes beyond the channels stay zero: loops of a fixed length are faster than exact ones.
    s, rates = np.zeros((modes, LANES), x.dtype), np.zeros((modes, LANES), x.dtype)
    d, u, out = np.zeros(LANES, x.dtype), np.zeros(LANES, x.dtype), np.zeros(LANES, x.dtype)
    for m in range(modes):
        _take(rate, m, low, n, rates[m])
        _take(state[b], m, low, n, s[m])
    for t in range(x.shape[1]):
        if t % ROWS == 0:
            for m in range(modes):
                _put(s[m], kept[b, t // ROWS], m, low, n)
        if marks.size and marks[b, t] & PADDING:
            out[:] = 0.0
            _put(out, y[b], t, low, n)
            continue
        if marks.size and marks[b, t] & START:
            s[:] = 0.0
        _take(step[b], t, low, n, d)
        _take(x[b], t, low, n, u)
        for i in range(LANES):
            u[i] *= d[i]
            out[i] = 0.0
        for m in range(modes):
            amount, query = write[b, t, m], read[b, t, m]
            for i in range(LANES):
                value = _exp(d[i] * rates[m, i]) * s[m, i] + amount * u[i]
                s[m, i] = value
                out[i] += query * value
        _put(out, y[b], t, low, n)
    for m in range(modes):
        _put(s[m], last[b], m, low, n)


@kernel
def backward_kernel(  # type: ignore[no-untyped-def]
    rate, step, write, read, x, marks, kept, to_y, to_last, d_rate, d_step, d_write, d_read, d_x, d_state
):  # fmt: skip
    blocks = (x.shape[2] + LANES - 1) // LANES
    for index in prange(x.shape[0] * blocks):
        _backward(
            index // blocks, index % blocks, rate, step, write, read, x, marks, kept, to_y, to_last,
            d_rate, d_step, d_write, d_read, d_x, d_state,
        )  # fmt: skip


@job
def _backward(  # type: ignore[no-untyped-def]
    b, block, rate, step, write, read, x, marks, kept, to_y, to_last, d_rate, d_step, d_write, d_read, d_x, d_state
):  # fmt: skip
    """From each state that was kept: forwards for the states of the rows, then back with the gradient of the state.

    d_write and d_read [B, blocks, T, N] are this block's share of a sum over all channels.
    """
    low = block * LANES
    length, n, modes, kind = x.shape[1], min(LANES, x.shape[2] - low), rate.shape[0], x.dtype
    s, back, rates = np.zeros((modes, LANES), kind), np.zeros((modes, LANES), kind), np.zeros((modes, LANES), kind)
    # Of each row: the state after its decay, before it is written; and the decay.
    old, decay = np.zeros((ROWS, modes, LANES), kind), np.zeros((ROWS, modes, LANES), kind)
    steps, inputs = np.zeros((ROWS, LANES), kind), np.zeros((ROWS, LANES), kind)
    rate_sum, grad, u = np.zeros((modes, LANES)), np.zeros(LANES, kind), np.zeros(LANES, kind)
    new, written, decayed = np.zeros(LANES, kind), np.zeros(LANES, kind), np.zeros(LANES, kind)
    for m in range(modes):
        _take(rate, m, low, n, rates[m])
        _take(to_last[b], m, low, n, back[m])
    for chunk in range((length - 1) // ROWS, -1, -1):
        start, stop = chunk * ROWS, min((chunk + 1) * ROWS, length)
        for m in range(modes):
            _take(kept[b, chunk], m, low, n, s[m])
        for t in range(start, stop):
            if marks.size and marks[b, t] & PADDING:
                continue
            if marks.size and marks[b, t] & START:
                s[:] = 0.0
            r = t - start
            d, v = steps[r], inputs[r]
            _take(step[b], t, low, n, d)
            _take(x[b], t, low, n, v)
            for m in range(modes):
                amount = write[b, t, m]
                for i in range(LANES):
                    a = _exp(d[i] * rates[m, i])
                    value = a * s[m, i]
                    decay[r, m, i] = a
                    old[r, m, i] = value
                    s[m, i] = value + amount * (d[i] * v[i])
        for t in range(stop - 1, start - 1, -1):
            if marks.size and marks[b, t] & PADDING:
                written[:] = 0.0
                _put(written, d_x[b], t, low, n)
                _put(written, d_step[b], t, low, n)
                d_write[b, block, t] = 0.0
                d_read[b, block, t] = 0.0
                continue
            r = t - start
            d, v = steps[r], inputs[r]
            _take(to_y[b], t, low, n, grad)
            for i in range(LANES):
                u[i] = d[i] * v[i]
                written[i] = 0.0
                decayed[i] = 0.0
            for m in range(modes):
                amount, query = write[b, t, m], read[b, t, m]
                for i in range(LANES):
                    new[i] = old[r, m, i] + amount * u[i]
                    to_state = back[m, i] + query * grad[i]
                    through = to_state * old[r, m, i]
                    written[i] += to_state * amount
                    decayed[i] += through * rates[m, i]
                    rate_sum[m, i] += through * d[i]
                    back[m, i] = to_state
                d_read[b, block, t, m] = _dot(new, grad)
                d_write[b, block, t, m] = _dot(back[m], u)
                for i in range(LANES):
                    back[m, i] *= decay[r, m, i]
            if marks.size and marks[b, t] & START:
                back[:] = 0.0
            for i in range(LANES):
                decayed[i] += written[i] * v[i]
                written[i] *= d[i]
            _put(decayed, d_step[b], t, low, n)
            _put(written, d_x[b], t, low, n)
    for m in range(modes):
        _put(rate_sum[m], d_rate[b], m, low, n)
        _put(back[m], d_state[b], m, low, n)
