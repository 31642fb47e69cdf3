"""The conditioner's features as one compiled kernel each way: on so few channels, operations are mostly calls.

Features are computed for LANES tokens side by side: there may be as few as four of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.marks import END, NO_MARKS, PADDING, START
from femixer.kernels.numba_kernel import busy_kernel, inline, job
from femixer.kernels.numba_math import f32, sigmoid32, softplus32

FLOATS = (torch.float32,)
READS_RESULTS = slice(-1, None)
LANES = 32
# F.normalize's least norm.
LEAST = f32(1e-12)


def forward(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    batch, length, channels = y.shape[0], y.shape[1], y.shape[2] // 3
    features, last = y.new_empty(batch, length, channels), y.new_empty(batch, channels)
    sums = y.new_empty(batch, length, channels if causal else 2 * channels, dtype=torch.float64)
    initial = y.new_zeros(batch, channels) if initial is None else initial
    forward_kernel(y, NO_MARKS if marks is None else marks, initial, eps, sums, features, last)
    return features, last, sums


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    (y, marks, initial, _, eps), (to_features, to_last), (sums,) = arguments, grads[:2], results
    batch, length, channels = y.shape[0], y.shape[1], y.shape[2] // 3
    to_features = y.new_zeros(batch, length, channels) if to_features is None else to_features
    to_last = y.new_zeros(batch, channels) if to_last is None else to_last
    initial = y.new_zeros(batch, channels) if initial is None else initial
    to_y, to_initial = y.new_empty(*y.shape), y.new_empty(batch, channels)
    marks = NO_MARKS if marks is None else marks
    backward_kernel(to_features, to_last, y, marks, initial, eps, sums, to_y, to_initial)
    return to_y, None, to_initial


@busy_kernel
def forward_kernel(y, marks, initial, eps, sums, features, last):  # type: ignore[no-untyped-def]
    """y [B, T, 3 C]: s, u and a; initial [B, C] -> sums [B, T, C or 2 C], features [B, T, C] and the state after the
    last token [B, C]. marks int8 [B, T], or empty where there are none. With 2 C sums, those over later tokens too."""
    for b in prange(y.shape[0]):
        _forward(y[b], marks[min(b, marks.shape[0]) : b + 1], initial[b], eps, sums[b], features[b], last[b])


@job
def _forward(y, marks, initial, eps, sums, features, last):  # type: ignore[no-untyped-def]
    channels = initial.size
    _add_up(y, marks, initial, sums)
    for c in range(channels):
        last[c] = sums[y.shape[0] - 1, c]
    a, summed = np.empty((channels, LANES), dtype=f32), np.empty((channels, LANES), dtype=f32)
    length, spread = np.empty(LANES, dtype=f32), np.empty(LANES, dtype=f32)
    for first in range(0, y.shape[0], LANES):
        count = min(LANES, y.shape[0] - first)
        _load(y[first : first + count], 2 * channels, a)
        _load_sums(sums[first : first + count], summed)
        _direction(a, length)
        _normalised(summed, eps, spread)
        for c in range(channels):
            for lane in range(length.size):
                a[c, lane] *= sigmoid32(a[c, lane]) * summed[c, lane]
        _store(a, features[first : first + count], 0)


@busy_kernel
def backward_kernel(grad, to_last, y, marks, initial, eps, sums, to_y, to_initial):  # type: ignore[no-untyped-def]
    """Gradients of y and of the initial state, from those of the features and of the last state."""
    for b in prange(y.shape[0]):
        line = slice(min(b, marks.shape[0]), b + 1)
        _backward(grad[b], to_last[b], y[b], marks[line], initial[b], eps, sums[b], to_y[b], to_initial[b])


@job
def _backward(grad, to_last, y, marks, initial, eps, sums, to_y, to_initial):  # type: ignore[no-untyped-def]
    channels, tokens = initial.size, y.shape[0]
    to_h = np.empty((tokens, channels), dtype=f32)
    g, logits = np.empty((channels, LANES), dtype=f32), np.empty((channels, LANES), dtype=f32)
    z, summed = np.empty((channels, LANES), dtype=f32), np.empty((channels, LANES), dtype=f32)
    for first in range(0, tokens, LANES):
        count = min(LANES, tokens - first)
        _load(grad[first : first + count], 0, g)
        _load(y[first : first + count], 2 * channels, logits)
        _load_sums(sums[first : first + count], summed)
        _through_features(g, logits, z, summed, eps)
        _store(z, to_y[first : first + count], 2 * channels)
        _store(g, to_h[first : first + count], 0)
    for c in range(channels):
        to_initial[c] = _through_sums(c, to_h, to_last, y, marks, initial, sums, to_y)


@inline
def _decay(y, mark, t, c):  # type: ignore[no-untyped-def]
    return f32(1.0) if mark & PADDING else sigmoid32(-y[t, c])


@job
def _add_up(y, marks, initial, sums):  # type: ignore[no-untyped-def]
    """sums [T, C or 2 C]: h_t = decay_t h_{t-1} + u_t, and beside it later_t = decay_t (u_{t+1} + later_{t+1})."""
    tokens, channels = y.shape[0], initial.size
    h = np.empty(channels)
    for c in range(channels):
        h[c] = initial[c]
    for t in range(tokens):
        mark = marks[0, t] if marks.size else 0
        for c in range(channels):
            kept = 0.0 if mark & START else _decay(y, mark, t, c) * h[c]
            h[c] = kept if mark & PADDING else kept + y[t, channels + c]
            sums[t, c] = h[c]
    if sums.shape[1] > channels:
        later = np.zeros(channels)
        for step in range(tokens):
            t = tokens - 1 - step
            mark = marks[0, t] if marks.size else 0
            for c in range(channels):
                reached = 0.0 if mark & END else _decay(y, mark, t, c) * later[c]
                sums[t, channels + c] = reached
                later[c] = reached if mark & PADDING else reached + y[t, channels + c]


@job
def _through_sums(c, to_h, to_last, y, marks, initial, sums, to_y):  # type: ignore[no-untyped-def]
    """The gradient of the initial state; `to_y` receives those of s and u, all for the channel c."""
    tokens, channels = to_h.shape
    error = np.float64(to_last[c])
    for step in range(tokens):
        t = tokens - 1 - step
        mark = marks[0, t] if marks.size else 0
        decay = _decay(y, mark, t, c)
        error += to_h[t, c]
        before = sums[t - 1, c] if t else np.float64(initial[c])
        to_y[t, channels + c] = 0.0 if mark & PADDING else error
        error = 0.0 if mark & START else error * decay
        # The decay sigmoid(-s) has the derivative decay (decay - 1), which is zero at padding.
        to_y[t, c] = error * before * (decay - f32(1.0))
    to_initial = error
    if sums.shape[1] > channels:
        error = 0.0
        for t in range(tokens):
            mark = marks[0, t] if marks.size else 0
            decay = _decay(y, mark, t, c)
            if not mark & PADDING:
                to_y[t, channels + c] += error
            error += to_h[t, c]
            to_y[t, c] += error * sums[t, channels + c] * (decay - f32(1.0))
            error = 0.0 if mark & END else error * decay
    return to_initial


@job
def _through_features(g, logits, z, y, eps):  # type: ignore[no-untyped-def]
    """All [C, lanes]. g holds the gradient of the features and receives that of the sums, which y holds; z receives
    that of the logits. Both norms, z = softplus(a) / |.| and y = LN(h), take out what points along their results."""
    length, spread = np.empty(LANES, dtype=f32), np.empty(LANES, dtype=f32)
    along_z, mean, along_y = np.zeros(LANES, dtype=f32), np.zeros(LANES, dtype=f32), np.zeros(LANES, dtype=f32)
    z[:] = logits
    _direction(z, length)
    _normalised(y, eps, spread)
    to_z = np.empty_like(z)
    for c in range(z.shape[0]):
        for lane in range(length.size):
            share = sigmoid32(z[c, lane])
            to_z[c, lane] = g[c, lane] * y[c, lane] * share * (f32(1.0) + z[c, lane] * (f32(1.0) - share))
            g[c, lane] *= z[c, lane] * share
        for lane in range(length.size):
            along_z[lane] += to_z[c, lane] * z[c, lane]
            mean[lane] += g[c, lane]
            along_y[lane] += g[c, lane] * y[c, lane]
    channels = f32(z.shape[0])
    for c in range(z.shape[0]):
        for lane in range(length.size):
            z[c, lane] = (to_z[c, lane] - z[c, lane] * along_z[lane]) / length[lane] * sigmoid32(logits[c, lane])
            g[c, lane] = (g[c, lane] - (mean[lane] + y[c, lane] * along_y[lane]) / channels) * spread[lane]


@job
def _direction(a, length):  # type: ignore[no-untyped-def]
    """softplus(a) / |softplus(a)| in place, and the length."""
    length[:] = f32(0.0)
    for c in range(a.shape[0]):
        for lane in range(length.size):
            a[c, lane] = softplus32(a[c, lane])
            length[lane] += a[c, lane] * a[c, lane]
    for lane in range(length.size):
        length[lane] = max(math.sqrt(length[lane]), LEAST)
    for c in range(a.shape[0]):
        for lane in range(length.size):
            a[c, lane] /= length[lane]


@job
def _normalised(h, eps, spread):  # type: ignore[no-untyped-def]
    """LN(h) in place, and one over the standard deviation."""
    mean = np.zeros(spread.size, dtype=f32)
    spread[:] = f32(0.0)
    channels = f32(h.shape[0])
    for c in range(h.shape[0]):
        for lane in range(spread.size):
            mean[lane] += h[c, lane] / channels
    for c in range(h.shape[0]):
        for lane in range(spread.size):
            h[c, lane] -= mean[lane]
            spread[lane] += h[c, lane] * h[c, lane]
    for lane in range(spread.size):
        spread[lane] = f32(1.0) / math.sqrt(spread[lane] / channels + f32(eps))
    for c in range(h.shape[0]):
        for lane in range(spread.size):
            h[c, lane] *= spread[lane]


@job
def _load(x, column, out):  # type: ignore[no-untyped-def]
    """Tokens [n, .] as [C, lanes], from a column on; zeros where there are no tokens."""
    out[:] = f32(0.0)
    for lane in range(x.shape[0]):
        for c in range(out.shape[0]):
            out[c, lane] = x[lane, column + c]


@job
def _load_sums(sums, out):  # type: ignore[no-untyped-def]
    out[:] = f32(0.0)
    channels = out.shape[0]
    for lane in range(sums.shape[0]):
        for c in range(channels):
            total = sums[lane, c]
            out[c, lane] = total if sums.shape[1] == channels else total + sums[lane, channels + c]


@job
def _store(x, out, column):  # type: ignore[no-untyped-def]
    for lane in range(out.shape[0]):
        for c in range(x.shape[0]):
            out[lane, column + c] = x[c, lane]
