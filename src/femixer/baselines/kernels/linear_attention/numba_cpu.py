"""Linear attention with decays per channel, token by token in a compiled loop.

On a CPU this is several times faster than matrix products within chunks at the widths of heads in use: there decays per
channel make every factor of a product anew.

Arrays: q, k [B, T, H, E]; v, y [B, T, H, D]; gate log decays [B, T, H, E], or [B, T, H, D] if of_values; marks [B, T]
or empty; state, last [B, H, E, D].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.marks import NO_MARKS, PADDING, START
from femixer.kernels.numba_kernel import job, kernel, summing_job
from femixer.kernels.numba_math import exp
from femixer.kernels.operator import filled

FLOATS, ANY = (torch.float32,), ("state",)
READS_RESULTS = False
# States are kept for so many tokens; before that, every so many tokens.
KEPT = 64


def refuse(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, marks: Tensor | None, state: Tensor | None, *_: Any
) -> str | None:
    if gate is None or gate.dim() == 3:
        return "it takes decays per channel; with one per head or none, torch's matrix products are as fast"
    if any(x.shape[:3] != v.shape[:3] for x in (q, k, gate)):
        return "it takes queries, keys and gates of every sequence and head"
    return None


def _complete(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, gate, marks, state, of_values, _ = arguments
    batch, _, heads, width = v.shape
    state = v.new_zeros(batch, heads, k.shape[3], width) if state is None else state.to(v.dtype)
    return q, k, v, gate, NO_MARKS if marks is None else marks, state, of_values


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    k, v, keep = arguments[1], arguments[2], arguments[-1]
    y, last = v.new_empty(*v.shape), v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    forward_kernel(*_complete(arguments), y, last)
    return y, last if keep else v.new_empty(0)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, gate, _, state, *_ = arguments
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    found = [x.new_zeros(*x.shape) for x in (q, k, v, gate, last)]  # zero at padding
    given = filled(grads if grads[1] is None or grads[1].numel() else (grads[0], None), (v, last))
    backward_kernel(*given, *_complete(arguments), *found)
    return *found[:4], None, None if state is None else found[4].to(state.dtype)


@job
def _decays(gate, decay):  # type: ignore[no-untyped-def]
    for i in range(decay.size):
        decay[i] = exp(gate[i])


@job
def _advance(s, k, v, decay, of_values, new):  # type: ignore[no-untyped-def]
    """new = decay * s + k vᵀ"""
    for m in range(s.shape[0]):
        key = np.float64(k[m])
        if of_values:
            for w in range(s.shape[1]):
                new[m, w] = s[m, w] * decay[w] + key * v[w]
        else:
            a = decay[m]
            for w in range(s.shape[1]):
                new[m, w] = s[m, w] * a + key * v[w]


@job
def _read(s, q, total, y):  # type: ignore[no-untyped-def]
    """y = sᵀ q"""
    total[:] = 0.0
    for m in range(s.shape[0]):
        query = np.float64(q[m])
        for w in range(s.shape[1]):
            total[w] += query * s[m, w]
    for w in range(s.shape[1]):
        y[w] = total[w]


@kernel
def forward_kernel(q, k, v, gate, marks, state, of_values, y, last):  # type: ignore[no-untyped-def]
    heads = q.shape[2]
    for index in prange(q.shape[0] * heads):
        _forward(index // heads, index % heads, q, k, v, gate, marks, state, of_values, y, last)


@job
def _forward(b, h, q, k, v, gate, marks, state, of_values, y, last):  # type: ignore[no-untyped-def]
    s = state[b, h].astype(np.float64)
    total, decay = np.zeros(s.shape[1]), np.empty(gate.shape[3])
    for t in range(q.shape[1]):
        mark = marks[b, t] if marks.size else 0
        if mark & PADDING:
            y[b, t, h] = 0.0
            continue
        if mark & START:
            s[:] = 0.0
        _decays(gate[b, t, h], decay)
        _advance(s, k[b, t, h], v[b, t, h], decay, of_values, s)
        _read(s, q[b, t, h], total, y[b, t, h])
    last[b, h] = s


@kernel
def backward_kernel(to_y, to_last, q, k, v, gate, marks, state, of_values, d_q, d_k, d_v, d_gate, d_state):  # type: ignore[no-untyped-def]
    heads = q.shape[2]
    for index in prange(q.shape[0] * heads):
        b, h = index // heads, index % heads
        inputs = q[b, :, h], k[b, :, h], v[b, :, h], gate[b, :, h]
        results = d_q[b, :, h], d_k[b, :, h], d_v[b, :, h], d_gate[b, :, h], d_state[b, h]
        rows = marks[b] if marks.size else marks.reshape(-1)
        _backward(to_y[b, :, h], to_last[b, h], inputs, rows, state[b, h], of_values, results)


@job
def _backward(to_y, to_last, inputs, marks, state, of_values, results):  # type: ignore[no-untyped-def]
    q, k, v, gate = inputs
    length, rows, width = q.shape[0], q.shape[1], v.shape[1]
    blocks = (length + KEPT - 1) // KEPT
    borders, history = np.empty((blocks, rows, width)), np.empty((KEPT + 1, rows, width))
    decay, error, sums = np.empty(gate.shape[1]), to_last.astype(np.float64), np.empty((2, width))
    history[0] = state
    for block in range(blocks):
        borders[block] = history[0]
        if block < blocks - 1:
            _states(block * KEPT, k, v, gate, marks, of_values, decay, history)
            history[0] = history[KEPT]
    for block in range(blocks - 1, -1, -1):
        start = block * KEPT
        history[0] = borders[block]
        _states(start, k, v, gate, marks, of_values, decay, history)
        for i in range(min(KEPT, length - start) - 1, -1, -1):
            t = start + i
            mark = marks[t] if marks.size else 0
            if mark & PADDING:
                continue
            _decays(gate[t], decay)
            if mark & START:
                decay[:] = 0.0
            _step_back(t, history[i : i + 2], error, to_y[t], inputs, decay, of_values, results, sums)
            if mark & START:
                error[:] = 0.0
    results[4][:] = error


@job
def _states(start, k, v, gate, marks, of_values, decay, history):  # type: ignore[no-untyped-def]
    """The states after the tokens from start on, as many as are kept, from history[0] before them."""
    for i in range(min(KEPT, k.shape[0] - start)):
        t = start + i
        mark = marks[t] if marks.size else 0
        if mark & PADDING:
            history[i + 1] = history[i]
            continue
        _decays(gate[t], decay)
        if mark & START:
            decay[:] = 0.0
        _advance(history[i], k[t], v[t], decay, of_values, history[i + 1])


@summing_job
def _step_back(t, states, error, to_y, inputs, decay, of_values, results, sums):  # type: ignore[no-untyped-def]
    """error: d S_t from what comes later, on return d S_{t-1} from what comes from t on."""
    q, k, v, _ = inputs
    d_q, d_k, d_v, d_gate, _ = results
    before, read = states[0], states[1]
    rows, width = before.shape
    to_v, to_decay = sums[0], sums[1]
    for w in range(width):
        to_v[w] = to_decay[w] = 0.0
    for m in range(rows):
        query, key = np.float64(q[t, m]), np.float64(k[t, m])
        to_query = to_key = through = 0.0
        for w in range(width):
            to_query += read[m, w] * to_y[w]
        for w in range(width):
            error[m, w] += query * to_y[w]
        for w in range(width):
            to_key += error[m, w] * v[t, w]
        for w in range(width):
            to_v[w] += error[m, w] * key
        if of_values:
            for w in range(width):
                to_decay[w] += error[m, w] * before[m, w]
            for w in range(width):
                error[m, w] *= decay[w]
        else:
            for w in range(width):
                through += error[m, w] * before[m, w]
            for w in range(width):
                error[m, w] *= decay[m]
            d_gate[t, m] = through * decay[m]
        d_q[t, m], d_k[t, m] = to_query, to_key
    for w in range(width):
        d_v[t, w] = to_v[w]
    if of_values:
        for w in range(width):
            d_gate[t, w] = to_decay[w] * decay[w]
