"""Compiled kernels of `femixer.conditioner`, float32; sums over time are float64.

Tokens carry marks: START, nothing before them counts; END, nothing after; PADDING, they count for nothing themselves.
Features are computed for LANES tokens side by side: there may be as few as four of them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from femixer.kernels.native.narrow import add_outer, combine, products, take
from femixer.kernels.native.primitives import busy_kernel, f32, inline, job, sigmoid32, softplus32, summing

START, END, PADDING = 1, 2, 4
LANES = 32
# F.normalize's least norm.
LEAST = f32(1e-12)


@busy_kernel
def forward(x, weight, bias, marks, initial, causal, eps, y, features, last):  # type: ignore[no-untyped-def]
    """y [B, T, 3 C] = LN(x) Wᵀ + b: s, u and a; from them features [B, T, C] and the state after the last token [B, C].

    x [n, dim], weight [3 C, dim]; where the weight is empty y is there already. marks int8 [B, T], or empty where there
    are none; initial [B, C].
    """
    if weight.size:
        flat = y.reshape(-1, y.shape[2])
        for task in prange(-(-x.shape[0] // LANES)):
            _normalized_linear(task * LANES, min((task + 1) * LANES, x.shape[0]), x, weight, bias, f32(eps), flat)
    for b in prange(y.shape[0]):
        _forward(y[b], marks[min(b, marks.shape[0]) : b + 1], initial[b], causal, eps, features[b], last[b])


@job
def _forward(y, marks, initial, causal, eps, features, last):  # type: ignore[no-untyped-def]
    channels = initial.size
    _, h, later = _sums(y, marks, initial, causal)
    for c in range(channels):
        last[c] = h[y.shape[0], c]
    a, summed = np.empty((channels, LANES), dtype=f32), np.empty((channels, LANES), dtype=f32)
    length, spread = np.empty(LANES, dtype=f32), np.empty(LANES, dtype=f32)
    for first in range(0, y.shape[0], LANES):
        count = min(LANES, y.shape[0] - first)
        _load(y[first : first + count], 2 * channels, a)
        _load_sum(h[first + 1 : first + 1 + count], later[first : first + count], summed)
        _direction(a, length)
        _normalised(summed, eps, spread)
        for c in range(channels):
            for lane in range(length.size):
                a[c, lane] *= sigmoid32(a[c, lane]) * summed[c, lane]
        _store(a, features[first : first + count], 0)


@busy_kernel
def backward(grad, to_last, y, marks, initial, causal, eps, x, weight, to_y, to_initial, to_x, to_weight):  # type: ignore[no-untyped-def]
    """Gradients of y and of the initial state, from those of the features and of the last state; if there is a weight,
    those of x and, from the rows of each task, [tasks, 3 C, dim], of the weight."""
    for b in prange(y.shape[0]):
        line = slice(min(b, marks.shape[0]), b + 1)
        _backward(grad[b], to_last[b], y[b], marks[line], initial[b], causal, eps, to_y[b], to_initial[b])
    if weight.size:
        flat, step = to_y.reshape(-1, to_y.shape[2]), -(-x.shape[0] // to_weight.shape[0])
        for task in prange(to_weight.shape[0]):
            rows = slice(task * step, min((task + 1) * step, x.shape[0]))
            _normalized_linear_backward(flat[rows], x[rows], weight, f32(eps), to_x[rows], to_weight[task])


@job
def _backward(grad, to_last, y, marks, initial, causal, eps, to_y, to_initial):  # type: ignore[no-untyped-def]
    channels, tokens = initial.size, y.shape[0]
    decay, h, later = _sums(y, marks, initial, causal)
    to_h = np.empty((tokens, channels), dtype=f32)
    g, logits = np.empty((channels, LANES), dtype=f32), np.empty((channels, LANES), dtype=f32)
    z, summed = np.empty((channels, LANES), dtype=f32), np.empty((channels, LANES), dtype=f32)
    for first in range(0, tokens, LANES):
        count = min(LANES, tokens - first)
        _load(grad[first : first + count], 0, g)
        _load(y[first : first + count], 2 * channels, logits)
        _load_sum(h[first + 1 : first + 1 + count], later[first : first + count], summed)
        _through_features(g, logits, z, summed, eps)
        _store(z, to_y[first : first + count], 2 * channels)
        _store(g, to_h[first : first + count], 0)
    for c in range(channels):
        to_initial[c] = _through_sums(c, to_h, to_last, y, marks, causal, decay, h, later, to_y)


@job
def _sums(y, marks, initial, causal):  # type: ignore[no-untyped-def]
    """decay [T, C] of the gates; h [T + 1, C] over earlier tokens, the initial one first; later [T, C] over later ones.

    h_t = decay_t h_{t-1} + u_t,   later_t = decay_t (u_{t+1} + later_{t+1})
    """
    tokens, channels = y.shape[0], initial.size
    decay = np.empty((tokens, channels), dtype=f32)
    h, later = np.empty((tokens + 1, channels)), np.zeros((tokens, channels))
    for c in range(channels):
        h[0, c] = initial[c]
    for t in range(tokens):
        mark = marks[0, t] if marks.size else 0
        for c in range(channels):
            decay[t, c] = f32(1.0) if mark & PADDING else sigmoid32(-y[t, c])
            kept = 0.0 if mark & START else decay[t, c] * h[t, c]
            h[t + 1, c] = kept if mark & PADDING else kept + y[t, channels + c]
    if not causal:
        for step in range(1, tokens):
            t = tokens - 1 - step
            mark, after = (marks[0, t], marks[0, t + 1]) if marks.size else (0, 0)
            for c in range(channels):
                u = 0.0 if after & PADDING else y[t + 1, channels + c]
                later[t, c] = 0.0 if mark & END else decay[t, c] * (u + later[t + 1, c])
    return decay, h, later


@job
def _through_sums(c, to_h, to_last, y, marks, causal, decay, h, later, to_y):  # type: ignore[no-untyped-def]
    """The gradient of the initial state; `to_y` receives those of s and u, all for the channel c."""
    tokens, channels = decay.shape
    error = np.float64(to_last[c])
    for step in range(tokens):
        t = tokens - 1 - step
        mark = marks[0, t] if marks.size else 0
        error += to_h[t, c]
        to_y[t, channels + c] = 0.0 if mark & PADDING else error
        to_y[t, c] = 0.0 if mark & START else error * h[t, c]
        error *= 0.0 if mark & START else decay[t, c]
    to_initial = error
    if not causal:
        error = 0.0
        for t in range(tokens - 1):
            mark, after = (marks[0, t], marks[0, t + 1]) if marks.size else (0, 0)
            error += to_h[t, c]
            u = 0.0 if after & PADDING else y[t + 1, channels + c]
            if not mark & END:
                to_y[t, c] += error * (u + later[t + 1, c])
            error *= 0.0 if mark & END else decay[t, c]
            if not after & PADDING:
                to_y[t + 1, channels + c] += error
    for t in range(tokens):  # padding's decay is one, so it has no gradient
        to_y[t, c] *= -decay[t, c] * (f32(1.0) - decay[t, c])
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
def _load_sum(x, y, out):  # type: ignore[no-untyped-def]
    out[:] = f32(0.0)
    for lane in range(x.shape[0]):
        for c in range(out.shape[0]):
            out[c, lane] = x[lane, c] + y[lane, c]


@job
def _store(x, out, column):  # type: ignore[no-untyped-def]
    for lane in range(out.shape[0]):
        for c in range(x.shape[0]):
            out[lane, column + c] = x[c, lane]


@job
def _normalized_linear(first, last, x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    centred, y = np.zeros((4, x.shape[1]), dtype=f32), np.empty((4, weight.shape[0]), dtype=f32)
    scale = np.empty(4, dtype=f32)
    for start in range(first, last, 4):
        for k in range(min(4, last - start)):
            scale[k] = _centre(x, start + k, eps, centred, k)
        products(weight, centred, y)
        for k in range(min(4, last - start)):
            for o in range(y.shape[1]):
                out[start + k, o] = y[k, o] * scale[k] + bias[o]


@job
def _normalized_linear_backward(grad, x, weight, eps, to_x, to_weight):  # type: ignore[no-untyped-def]
    """With z = LN(x), g the gradient of z: dx = (g - mean(g) - z mean(g z)) / std, dW = sum of grad zᵀ over rows."""
    z, g = np.zeros((4, x.shape[1]), dtype=f32), np.empty((4, x.shape[1]), dtype=f32)
    shares = np.empty((4, weight.shape[0]), dtype=f32)
    to_weight[:] = f32(0.0)
    for start in range(0, x.shape[0], 4):
        take(grad, start, x.shape[0], shares)
        combine(shares, weight, g)
        for k in range(min(4, x.shape[0] - start)):
            row = start + k
            scale = _centre(x, row, eps, z, k)
            for i in range(z.shape[1]):
                z[k, i] *= scale
            mean, along = _means(g, z, k)
            for i in range(z.shape[1]):
                to_x[row, i] = (g[k, i] - mean - z[k, i] * along) * scale
        add_outer(shares, z, to_weight)  # rows that are missing have no gradient


@summing
def _mean(x, row):  # type: ignore[no-untyped-def]
    total = f32(0.0)
    for i in range(x.shape[1]):
        total += x[row, i]
    return total / f32(x.shape[1])


@summing
def _variance(x, row, mean):  # type: ignore[no-untyped-def]
    total = f32(0.0)
    for i in range(x.shape[1]):
        total += (x[row, i] - mean) * (x[row, i] - mean)
    return total / f32(x.shape[1])


@inline
def _centre(x, row, eps, out, k):  # type: ignore[no-untyped-def]
    """x[row] less its mean, as out[k], and one over its standard deviation."""
    mean = _mean(x, row)
    for i in range(x.shape[1]):
        out[k, i] = x[row, i] - mean
    return f32(1.0) / math.sqrt(_variance(x, row, mean) + eps)


@summing
def _means(g, z, k):  # type: ignore[no-untyped-def]
    """Of g[k] and of g[k] z[k]."""
    mean, along = f32(0.0), f32(0.0)
    for i in range(g.shape[1]):
        mean += g[k, i]
        along += g[k, i] * z[k, i]
    return mean / f32(g.shape[1]), along / f32(g.shape[1])
