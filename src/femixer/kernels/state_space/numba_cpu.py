"""The state-space read as one compiled loop over time for a block of channels, each way.

Per channel the state holds N decayed sums of the streams 1, v and exp(beta v - top), where top follows the largest
exponent as it decays with the slowest of the modes, so that nothing over- or underflows, whatever the values.

Arrays: rate [N, C] log decays per unit of step; v [B, T, C]; beta [C]; marks [B, T]; state [B, 3, N, C], top [B, C]
float64; mean, free, log_total [B, T, C]. Either step [B, T, C], write [B, T, N] and read [B, T, N], and a token is read
through the state; or weight [N, C], with which modes are read, and skip [C], with which a token is read instead. Empty
arrays stand for nothing, for steps and writes of 1.

What a block of channels works on lies in few arrays, as lines of LANES numbers at constant distances: the compiler has
to see that they do not overlap. For the same reason a state is never updated in place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.marks import NO_MARKS, PADDING, START
from femixer.kernels.numba_kernel import inline, job, kernel, summing, u64
from femixer.kernels.numba_math import exp, log
from femixer.kernels.operator import filled

FLOATS, STATES = (torch.float32, torch.float64), ("sums", "top")
READS_RESULTS = False
# Dimensions of an argument that is not there, from rate to top.
_DIMS = (2, 3, 3, 3, 2, 1, 3, 1, 2, 4, 2)
_MARKS = 8
LANES = 32  # channels that one thread works on at a time
# Below this a total is nothing, and a sum of exponentials beyond sight; the free energy is then the mean.
TINY = 1e-290
NEAR = 40.0


def _complete(arguments: tuple[Any, ...]) -> list[Any]:
    """As the loops take them: empty tensors for what is not there."""
    given = list(arguments)
    for i, dims in enumerate(_DIMS):
        if given[i] is None:
            given[i] = NO_MARKS if i == _MARKS else given[0].new_empty((0,) * dims)
    return given


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    v, beta, _, sums, top = arguments[6:11]
    free = v.new_empty(*((0, 0, 0) if beta is None else v.shape))
    results = v.new_empty(*v.shape), free, v.new_empty(*v.shape), sums.new_empty(*sums.shape), top.new_empty(*top.shape)
    forward_kernel(*_complete(arguments), *results)
    return results


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    rate, step, write, read, v, beta, sums = (arguments[i] for i in (0, 1, 2, 3, 6, 7, 9))
    batch, length, width = v.shape
    like = (v, v.new_empty((0, 0, 0) if beta is None else v.shape), v, sums)
    given = filled(grads[:4], like)
    blocks, modes = -(-width // LANES), rate.shape[0]
    to_v, to_sums = v.new_empty(v.shape), sums.new_empty(sums.shape)
    to_step = v.new_empty((0, 0, 0) if step is None else v.shape)
    parts = [v.new_empty((0,) * 4 if x is None else (batch, blocks, length, modes)) for x in (write, read)]
    per_mode = [sums.new_zeros(batch, modes, width) for _ in range(2)]
    per_channel = [sums.new_zeros(batch, width) for _ in range(2)]
    found = (per_mode[0], to_step, *parts, per_mode[1], per_channel[0], to_v, per_channel[1], to_sums)
    backward_kernel(*_complete(arguments), *given, *found)
    to_write, to_read = (part.sum(1) for part in parts)
    to_rate, to_weight, to_skip, to_beta = (x.sum(0).to(v.dtype) for x in (*per_mode, *per_channel))
    gradients = (to_rate, to_step, to_write, to_read, to_weight, to_skip, to_v, to_beta, None, to_sums, None)
    return tuple(None if x is None else g for x, g in zip(arguments[:11], gradients, strict=True))


def _lines(*sizes: int) -> list[u64]:
    """Where parts of so many lines each begin, and how long they are together."""
    return [u64(sum(sizes[:i]) * LANES) for i in range(len(sizes) + 1)]


# A block: what goes on from token to token, and sums over the tokens.
TOP, SLOW, WARM, SKIP, BETA_SUM, SKIP_SUM, BLOCK = _lines(1, 1, 1, 1, 1, 1)
# A mode of a block: rate, and relative to the slowest mode; weight; sums of gradients; gradient of the streams' state.
RATE, LAG, WEIGHT, RATE_SUM, WEIGHT_SUM, BACK, MODE = _lines(1, 1, 1, 1, 1, 3)
# A mode of a state: the streams, and the decay by which they go on, relative to the slowest mode.
STREAM, DECAY, STATE = _lines(3, 1)
# A token: step, value, exponential; inputs, which are the step times each stream; decays of the slowest mode, for the
# streams 1 and v and for the exponentials; sums of the streams that are read; gradients of those, of inputs and step.
STEP, VALUE, ENERGY, INPUT, SLOWEST, FADE, SUM, TO_SUM, TO_INPUT, TO_STEP, TOKEN = _lines(1, 1, 1, 3, 1, 1, 3, 3, 3, 1)
ONE, TWO = u64(LANES), u64(2 * LANES)


@job
def _coefficients(c, r, o, n, single, energies):  # type: ignore[no-untyped-def]
    """Of the token r[o:] with its step and value: decays, exponential and inputs; top goes on."""
    for i in range(n):
        r[o + SLOWEST + i] = exp(single.dtype.type(r[o + STEP + i] * c[SLOW + i]))
    if energies:
        for i in range(n):
            before, slowest = c[TOP + i], r[o + SLOWEST + i]
            new, old = c[WARM + i] * r[o + VALUE + i], before + r[o + STEP + i] * c[SLOW + i]
            highest = max(old, new)
            fall, rest = before - highest, old - highest
            # The same rounded decay as the other streams have, wherever that does not overflow: in a narrow channel
            # only then the errors of the sums cancel.
            near = fall < NEAR
            factor = slowest if near else 1.0
            c[TOP + i] = highest
            r[o + FADE + i] = factor * exp(single.dtype.type(fall if near else rest))
            r[o + ENERGY + i] = exp(single.dtype.type(new - highest))
    for i in range(n):
        step = r[o + STEP + i]
        r[o + INPUT + i] = step
        r[o + INPUT + ONE + i] = step * r[o + VALUE + i]
        r[o + INPUT + TWO + i] = step * r[o + ENERGY + i]


@job
def _decays(s, now, g, r, o, n, single):  # type: ignore[no-untyped-def]
    for m in range(u64(g.size) // MODE):
        at, k = now + m * STATE + DECAY, m * MODE + LAG
        for i in range(n):
            s[at + i] = exp(single.dtype.type(r[o + STEP + i] * g[k + i]))


@inline
def _amounts(write, read, b, t, m):  # type: ignore[no-untyped-def]
    """With which weights a token is written to mode m and reads it, besides those of the channels."""
    return np.float64(write[b, t, m]) if write.size else 1.0, np.float64(read[b, t, m]) if read.size else 0.0


@job
def _advance(s, now, z, later, g, r, o, n, write, read, b, t):  # type: ignore[no-untyped-def]
    """Decay the state s[now:], read it into the token's sums, and write the token: s[later:]."""
    for i in range(TWO + ONE):
        r[o + SUM + i] = 0.0
    for m in range(u64(g.size) // MODE):
        amount, query = _amounts(write, read, b, t, m)
        old, new, k = now + m * STATE, later + m * STATE, m * MODE
        for i in range(n):
            factor, weight = s[old + DECAY + i], query + g[k + WEIGHT + i]
            decay, fade = factor * r[o + SLOWEST + i], factor * r[o + FADE + i]
            total, value, energy = s[old + i] * decay, s[old + ONE + i] * decay, s[old + TWO + i] * fade
            r[o + SUM + i] += weight * total
            r[o + SUM + ONE + i] += weight * value
            r[o + SUM + TWO + i] += weight * energy
            z[new + i] = total + amount * r[o + INPUT + i]
            z[new + ONE + i] = value + amount * r[o + INPUT + ONE + i]
            z[new + TWO + i] = energy + amount * r[o + INPUT + TWO + i]


@job
def _own_weight(write, read, b, t, exclusive):  # type: ignore[no-untyped-def]
    """With which weight, per unit of step, a row reads its own token through the state."""
    own = 0.0
    for m in range(0 if exclusive or not read.size else read.shape[2]):
        amount, query = _amounts(write, read, b, t, m)
        own += amount * query
    return own


@job
def _load(state, top, rate, weight, skip, beta, exclusive, b, low, n, s, c, g):  # type: ignore[no-untyped-def]
    """The block's part of everything that does not change from token to token."""
    for i in range(n):
        c[TOP + i] = top[b, low + i]
        c[WARM + i] = beta[low + i] if beta.size else 1.0
        c[SKIP + i] = skip[low + i] if skip.size and not exclusive else 0.0
        slow = np.float64(rate[0, low + i])
        for m in range(rate.shape[0]):
            slow = max(slow, np.float64(rate[m, low + i]))
        c[SLOW + i] = slow
        for m in range(rate.shape[0]):
            k = u64(m) * MODE + i
            g[k + RATE] = rate[m, low + i]
            g[k + LAG] = g[k + RATE] - slow
            g[k + WEIGHT] = weight[m, low + i] if weight.size else 0.0
            for j in range(3):
                s[u64(m) * STATE + u64(j) * ONE + i] = state[b, j, m, low + i]


@job
def _go_on(s, now, later, g, c, r, o, n, low, b, t, step, v, write, read, energies):  # type: ignore[no-untyped-def]
    """From the state s[now:] by token t to s[later:], with all that is to be known of the token in r[o:]."""
    for i in range(n):
        r[o + VALUE + i] = v[b, t, low + i]
    if step.size:
        for i in range(n):
            r[o + STEP + i] = step[b, t, low + i]
    _coefficients(c, r, o, n, v, energies)
    if step.size:
        _decays(s, now, g, r, o, n, v)
    _advance(s, now, s, later, g, r, o, n, write, read, b, t)


@job
def _add_itself(c, r, o, n, own):  # type: ignore[no-untyped-def]
    """Add what a row reads of its own token to its sums."""
    for i in range(n):
        weight = own + c[SKIP + i]
        r[o + SUM + i] += weight * r[o + INPUT + i]
        r[o + SUM + ONE + i] += weight * r[o + INPUT + ONE + i]
        r[o + SUM + TWO + i] += weight * r[o + INPUT + TWO + i]


@job
def _start(s, now, modes, c):  # type: ignore[no-untyped-def]
    """Forget everything; the decays in the state may be those of every token."""
    for m in range(modes):
        for i in range(DECAY):
            s[now + m * STATE + i] = 0.0
    for i in range(ONE):
        c[TOP + i] = -math.inf


@job
def _store(s, start, distance, modes, target, b, low, n):  # type: ignore[no-untyped-def]
    """The streams of the modes, which lie so far apart, as [B, 3, N, C]."""
    for m in range(modes):
        for j in range(u64(3)):
            for i in range(n):
                target[b, j, m, low + i] = s[start + m * distance + j * ONE + i]


@kernel
def forward_kernel(  # type: ignore[no-untyped-def]
    rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive,
    mean, free, log_total, last, last_top,
):  # fmt: skip
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _forward(
            index // blocks, index % blocks, rate, step, write, read, weight, skip, v, beta, marks, state, top,
            exclusive, mean, free, log_total, last, last_top,
        )  # fmt: skip


@job
def _forward(  # type: ignore[no-untyped-def]
    b, block, rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive,
    mean, free, log_total, last, last_top,
):  # fmt: skip
    low, n, modes = u64(block * LANES), u64(min(LANES, v.shape[2] - block * LANES)), u64(rate.shape[0])
    size, o, now = modes * STATE, u64(0), u64(0)
    # Two states, used in turn.
    s, c, g, r = np.zeros(2 * size), np.zeros(BLOCK), np.zeros(modes * MODE), np.zeros(TOKEN)
    r[:LANES] = 1.0
    _load(state, top, rate, weight, skip, beta, exclusive, b, low, n, s, c, g)
    _decays(s, now, g, r, o, n, v)
    _decays(s, size, g, r, o, n, v)
    for t in range(v.shape[1]):
        if marks.size and marks[b, t] & PADDING:
            for i in range(n):
                mean[b, t, low + i] = 0.0
                log_total[b, t, low + i] = 0.0
                if beta.size:
                    free[b, t, low + i] = 0.0
            continue
        if marks.size and marks[b, t] & START:
            _start(s, now, modes, c)
        _go_on(s, now, size - now, g, c, r, o, n, low, b, t, step, v, write, read, beta.size > 0)
        _add_itself(c, r, o, n, _own_weight(write, read, b, t, exclusive))
        now = size - now
        for i in range(n):
            total = r[SUM + i]
            # Comparisons are written so that NaN propagates, here and below.
            mean[b, t, low + i] = r[SUM + ONE + i] / (1.0 if total <= TINY else total)
        if beta.size:
            for i in range(n):
                total = r[SUM + i]
                inverse = 1.0 / (1.0 if total <= TINY else total)
                average, ratio = r[SUM + ONE + i] * inverse, r[SUM + TWO + i] * inverse
                value = (c[TOP + i] + log(TINY if ratio <= TINY else ratio)) / c[WARM + i]
                lower = ratio <= TINY or value < average or average != average
                free[b, t, low + i] = average if lower else value
        for i in range(n):
            total = r[SUM + i]
            value = log(TINY if total <= TINY else total) if total < math.inf else total
            log_total[b, t, low + i] = -math.inf if total <= TINY else value
    _store(s, now, STATE, modes, last, b, low, n)
    for i in range(n):
        last_top[b, low + i] = c[TOP + i]


@kernel
def backward_kernel(  # type: ignore[no-untyped-def]
    rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive, to_mean, to_free, to_log, to_last,
    d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_state,
):  # fmt: skip
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _backward(
            index // blocks, index % blocks, rate, step, write, read, weight, skip, v, beta, marks, state, top,
            exclusive, to_mean, to_free, to_log, to_last,
            d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_state,
        )  # fmt: skip


@job
def _backward(  # type: ignore[no-untyped-def]
    b, block, rate, step, write, read, weight, skip, v, beta, marks, state, top, exclusive,
    to_mean, to_free, to_log, to_last, d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_state,
):  # fmt: skip
    """Forwards once to keep a state now and then; backwards from each of them, forwards again for the tokens between.

    d_write and d_read [B, blocks, T, N] are this block's share of a sum over all channels.
    """
    low, n, modes = u64(block * LANES), u64(min(LANES, v.shape[2] - block * LANES)), u64(rate.shape[0])
    length, size, now, energies = v.shape[1], modes * STATE, u64(0), beta.size > 0
    rows = max(16, int(math.sqrt(length)) // 2)
    # The states and tokens between two states that are kept.
    s, r = np.zeros((u64(rows) + u64(1)) * size), np.zeros(u64(rows) * TOKEN)
    c, g = np.zeros(BLOCK), np.zeros(modes * MODE)
    _load(state, top, rate, weight, skip, beta, exclusive, b, low, n, s, c, g)
    for row in range(u64(rows)):
        for i in range(n):
            r[row * TOKEN + STEP + i] = 1.0
        _decays(s, row * size, g, r, row * TOKEN, n, v)
    kept, kept_top = np.empty(((length + rows - 1) // rows, s[:size].size)), np.empty((length // rows + 1, LANES))
    for t in range(length):
        if t % rows == 0:
            kept[t // rows], kept_top[t // rows] = s[now : now + size], c[TOP : TOP + ONE]
        if marks.size and marks[b, t] & PADDING:
            continue
        if marks.size and marks[b, t] & START:
            _start(s, now, modes, c)
        _go_on(s, now, size - now, g, c, r, u64(0), n, low, b, t, step, v, write, read, energies)
        now = size - now
    for m in range(modes):
        for j in range(u64(3)):
            for i in range(n):
                g[m * MODE + BACK + j * ONE + i] = to_last[b, j, m, low + i]
    for chunk in range(kept.shape[0] - 1, -1, -1):
        start, stop = chunk * rows, min((chunk + 1) * rows, length)
        s[:size], c[TOP : TOP + ONE] = kept[chunk], kept_top[chunk]
        for t in range(start, stop):
            row = u64(t - start)
            now, o = row * size, row * TOKEN
            if marks.size and marks[b, t] & PADDING:
                s[now + size : now + size + size] = s[now : now + size]
                continue
            if marks.size and marks[b, t] & START:
                _start(s, now, modes, c)
            _go_on(s, now, now + size, g, c, r, o, n, low, b, t, step, v, write, read, energies)
            _add_itself(c, r, o, n, _own_weight(write, read, b, t, exclusive))
            _to_sums(c, r, o, n, to_mean, to_free, to_log, b, t, low)
        for t in range(stop - 1, start - 1, -1):
            row = u64(t - start)
            if marks.size and marks[b, t] & PADDING:
                for i in range(n):
                    d_v[b, t, low + i] = 0.0
                    if step.size:
                        d_step[b, t, low + i] = 0.0
                if write.size:
                    d_write[b, block, t] = 0.0
                if read.size:
                    d_read[b, block, t] = 0.0
                continue
            own = _own_weight(write, read, b, t, exclusive)
            _go_back(s, row * size, g, r, row * TOKEN, n, b, t, block, write, read, own, d_write, d_read)
            _to_token(c, r, row * TOKEN, n, own, step, d_v, d_step, b, t, low)
            if marks.size and marks[b, t] & START:
                for m in range(modes):
                    for i in range(ONE + TWO):
                        g[m * MODE + BACK + i] = 0.0
    _store(g, BACK, MODE, modes, d_state, b, low, n)
    for m in range(modes):
        for i in range(n):
            d_rate[b, m, low + i] = g[m * MODE + RATE_SUM + i]
            if weight.size:
                d_weight[b, m, low + i] = g[m * MODE + WEIGHT_SUM + i]
    for i in range(n):
        if skip.size and not exclusive:
            d_skip[b, low + i] = c[SKIP_SUM + i]
        if beta.size:
            d_beta[b, low + i] = c[BETA_SUM + i]


@summing
def _go_back(s, now, g, r, o, n, b, t, block, write, read, own, d_write, d_read):  # type: ignore[no-untyped-def]
    """From the gradient of the state after a token to that of s[now:], and to the token's inputs and its step."""
    itself = 0.0
    for i in range(n):
        r[o + TO_INPUT + i] = 0.0
        r[o + TO_INPUT + ONE + i] = 0.0
        r[o + TO_INPUT + TWO + i] = 0.0
        r[o + TO_STEP + i] = 0.0
    if own > 0:
        for i in range(ONE + TWO):
            itself += r[o + INPUT + i] * r[o + TO_SUM + i]
    for m in range(u64(g.size) // MODE):
        amount, query = _amounts(write, read, b, t, m)
        old, k = now + m * STATE, m * MODE
        reading, writing = 0.0, 0.0
        for i in range(n):
            factor, weight = s[old + DECAY + i], query + g[k + WEIGHT + i]
            decay, fade = factor * r[o + SLOWEST + i], factor * r[o + FADE + i]
            total, value, energy = s[old + i] * decay, s[old + ONE + i] * decay, s[old + TWO + i] * fade
            to_total, to_value, to_energy = g[k + BACK + i], g[k + BACK + ONE + i], g[k + BACK + TWO + i]
            r[o + TO_INPUT + i] += amount * to_total
            r[o + TO_INPUT + ONE + i] += amount * to_value
            r[o + TO_INPUT + TWO + i] += amount * to_energy
            writing += (
                to_total * r[o + INPUT + i] + to_value * r[o + INPUT + ONE + i] + to_energy * r[o + INPUT + TWO + i]
            )
            by_total, by_value, by_energy = r[o + TO_SUM + i], r[o + TO_SUM + ONE + i], r[o + TO_SUM + TWO + i]
            seen = total * by_total + value * by_value + energy * by_energy
            reading += seen
            g[k + WEIGHT_SUM + i] += seen
            to_total += weight * by_total
            to_value += weight * by_value
            to_energy += weight * by_energy
            # Of the decay's logarithm, rate times step.
            flow = total * to_total + value * to_value + energy * to_energy
            g[k + RATE_SUM + i] += flow * r[o + STEP + i]
            r[o + TO_STEP + i] += flow * g[k + RATE + i]
            g[k + BACK + i] = to_total * decay
            g[k + BACK + ONE + i] = to_value * decay
            g[k + BACK + TWO + i] = to_energy * fade
        if read.size:
            d_read[b, block, t, m] = reading + amount * itself
        if write.size:
            d_write[b, block, t, m] = writing + query * itself


@job
def _to_token(c, r, o, n, own, step, d_v, d_step, b, t, low):  # type: ignore[no-untyped-def]
    """Gradients of value and step from those of the inputs and of the sums."""
    for i in range(n):
        d, x, e = r[o + STEP + i], r[o + VALUE + i], r[o + ENERGY + i]
        by_total, by_value, by_energy = r[o + TO_SUM + i], r[o + TO_SUM + ONE + i], r[o + TO_SUM + TWO + i]
        weight = own + c[SKIP + i]
        to_total, to_value = r[o + TO_INPUT + i] + weight * by_total, r[o + TO_INPUT + ONE + i] + weight * by_value
        to_energy = r[o + TO_INPUT + TWO + i] + weight * by_energy
        r[o + TO_STEP + i] += to_total + x * to_value + e * to_energy
        weighted = d * e * to_energy
        r[o + TO_INPUT + i] = d * to_value + c[WARM + i] * weighted
        c[BETA_SUM + i] += x * weighted
        c[SKIP_SUM + i] += by_total + x * by_value + e * by_energy
    for i in range(n):
        d_v[b, t, low + i] = r[o + TO_INPUT + i]
    if step.size:
        for i in range(n):
            d_step[b, t, low + i] = r[o + TO_STEP + i]


@job
def _to_sums(c, r, o, n, to_mean, to_free, to_log, b, t, low):  # type: ignore[no-untyped-def]
    """Gradients of a token's sums from those of mean, free energy and log total."""
    for i in range(n):
        r[o + TO_SUM + i] = to_log[b, t, low + i]
        r[o + TO_SUM + ONE + i] = to_mean[b, t, low + i]
        if to_free.size:
            r[o + TO_SUM + TWO + i] = to_free[b, t, low + i]
    for i in range(n):
        total = r[o + SUM + i]
        there = total > TINY
        inverse = 1.0 / (total if there else 1.0)
        average, ratio = r[o + SUM + ONE + i] * inverse, r[o + SUM + TWO + i] * inverse
        value = (c[TOP + i] + log(max(ratio, TINY))) / c[WARM + i]
        free = ratio > TINY and value > average
        common, to_mean_, to_free_ = r[o + TO_SUM + i], r[o + TO_SUM + ONE + i], r[o + TO_SUM + TWO + i]
        slope = to_free_ / c[WARM + i] if free else 0.0
        to_average = to_mean_ if free else to_mean_ + to_free_
        scale = inverse if there else 0.0
        r[o + TO_SUM + i] = (common - slope - to_average * average) * scale
        r[o + TO_SUM + ONE + i] = to_average * scale
        r[o + TO_SUM + TWO + i] = slope * scale / (ratio if free else 1.0)
        c[BETA_SUM + i] -= slope * value if there else 0.0
