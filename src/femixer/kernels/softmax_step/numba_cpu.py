"""One token's softmax read: one compiled kernel where the token sees all of the cache, else as plain torch does it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.numba_kernel import array, job, kernel, summing_job, u64
from femixer.kernels.numba_math import exp32, f32
from femixer.kernels.softmax import softmax_read
from femixer.kernels.softmax_step import HEADROOM
from femixer.kernels.softmax_step import forward as in_plain_torch
from femixer.kernels.streams import FAR_BELOW, SMALL_BETA, least_sum

FLOATS, ANY = (torch.float32,), ("beta", "bias")
# Of sums, temperatures, differences to the shift and cached exponentials.
LIMITS = least_sum(torch.float32), SMALL_BETA, FAR_BELOW, HEADROOM
# Tokens at a time: their exponentials stay in the nearest memory, and sums over them in float32 are added to sums in
# float64.
BLOCK = 64
# Places in memory are sums of these: never negative, which lets loops be vectorised.
ONE, TWO, THREE, FOUR = u64(1), u64(2), u64(3), u64(4)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, keys, data, shift, beta, bias, segments_q, _, length, window = arguments
    sees_all = bias is None and segments_q is None and (window is None or window >= length)
    if k is None or v is None or not (sees_all and keys.is_contiguous() and data.is_contiguous()):
        return in_plain_torch(*arguments)
    (batch, _, heads, width), (groups, d) = q.shape, v.shape[2:]
    mean = q.new_empty(batch, 1, heads, d)
    free = mean if beta is None else q.new_empty(batch, 1, heads, d)
    top, doubt = q.new_empty(*shift.shape), q.new_empty(batch, groups, dtype=torch.int8)
    doubts = array(doubt)
    step(
        array(q.contiguous()).reshape(batch, groups, heads // groups, width),
        array(k.contiguous()).reshape(batch, groups, width),
        array(v.contiguous()).reshape(batch, groups, d),
        array(keys).reshape(batch * groups, -1),
        array(data).reshape(batch * groups, -1),
        data.shape[3],
        array(shift.contiguous()).reshape(batch, groups, d),
        q.new_empty(groups, 0) if beta is None else beta,
        length,
        LIMITS,
        array(top).reshape(batch, groups, d),
        array(mean).reshape(batch, groups, -1, d),
        array(free).reshape(batch, groups, -1, d),
        doubts,
    )
    if beta is not None and doubts.any():
        k, v = keys[:, :, :length].transpose(1, 2), data[:, :, :length, :d].transpose(1, 2)
        mean, exact = softmax_read(q, k, v, beta)
        assert exact is not None
        free = exact
    return mean, q.new_empty(0) if beta is None else free, top, doubt


@kernel
def step(q, k, v, keys, data, wide, shift, beta, seen, limits, top, mean, free, doubt):  # type: ignore[no-untyped-def]
    """q [B, G, R, E], k [B, G, E], v [B, G, D]: a token. keys [B G, room E] and data [B G, room wide], where wide is D
    or 2 D and the rooms may differ: a cache of `seen` tokens, of which this one is the last and is written here.
    shift [B, G, D]; beta [G, D], or [G, 0] where only the mean is read -> top [B, G, D], the shift with this token;
    mean, free [B, G, R, D].

    doubt [B, G]: 1 where a sum, a temperature or the digits of a difference are below or beyond `limits` (least sum,
    least beta, how far below the shift), 2 where an exponential to be cached is (how many nats above the shift).
    """
    for row in prange(keys.shape[0]):
        b, g = row // q.shape[1], row % q.shape[1]
        high = _append(k[b, g], v[b, g], keys[row], data[row], shift[b, g], beta[g], seen, wide, limits[3], top[b, g])
        bad = _read(q[b, g], keys[row], data[row], top[b, g], beta[g], seen, wide, limits, mean[b, g], free[b, g])
        doubt[b, g] = 2 if high else int(bad)


@job
def _append(k, v, keys, data, shift, beta, seen, wide, most, top):  # type: ignore[no-untyped-def]
    """Write the token. Returns whether a cached exponential is above `most` nats; where none are cached, the shift
    becomes the largest value so far."""
    for i in range(k.size):
        keys[(seen - 1) * k.size + i] = k[i]
    at = (seen - 1) * wide
    high = False
    for i in range(v.size):
        data[at + i] = v[i]
        if wide == v.size:
            top[i] = max(shift[i], v[i])
        else:
            above = beta[i] * (v[i] - shift[i])
            data[at + v.size + i] = exp32(above)
            high |= above > most
            top[i] = shift[i]
    return high


@job
def _read(q, keys, data, top, beta, seen, wide, limits, mean, free):  # type: ignore[no-untyped-def]
    """mean and free [R, D] of the queries q [R, E]. Returns whether one is doubtful."""
    heads, width = mean.shape
    p = np.empty((heads, seen), dtype=f32)
    whole = np.empty(heads)
    for r in range(heads):
        whole[r] = _weights(p[r], _scores(q[r], keys, p[r]))
    sums = np.zeros((heads, width + beta.size))
    _sums(p, data, wide, top, beta, sums)
    least, cold, far, _ = limits
    bad = False
    for r in range(heads):
        for i in range(width):
            average = sums[r, i] / whole[r]
            mean[r, i] = average
            if beta.size:
                total = sums[r, width + i] / whole[r]
                value = top[i] + math.log(max(total, least)) / beta[i]
                bad |= total < least or beta[i] < cold or top[i] - value > far * max(abs(value), 1.0)
                free[r, i] = average if value < average else value
    return bad


@summing_job
def _scores(q, keys, p):  # type: ignore[no-untyped-def]
    """p = <q, k> / sqrt(E). Returns the largest."""
    scale, width = f32(1.0 / math.sqrt(q.size)), u64(q.size)
    top = f32(-np.inf)
    for s in range(u64(p.size)):
        at = s * width
        score = f32(0.0)
        for i in range(width):
            score += q[i] * keys[at + i]
        p[s] = score * scale
        top = max(top, p[s])
    return top


@summing_job
def _weights(p, top):  # type: ignore[no-untyped-def]
    """Scores of a head to weights relative to the largest, in place. Returns their sum."""
    for s in range(p.size):
        p[s] = exp32(p[s] - top)
    whole = 0.0
    for s in range(p.size):
        whole += p[s]
    return whole


@job
def _sums(p, data, wide, top, beta, sums):  # type: ignore[no-untyped-def]
    """sums [R, D or 2 D] = sum_s p[r, s] [v_s, exp(beta (v_s - top))], the second as cached or made here."""
    heads, width, both = p.shape[0], top.size, sums.shape[1]
    made = both > wide
    block = BLOCK * width if made else 0
    # Repeated for every token of a block, so that its exponentials are one long loop.
    tops, slopes, exponentials = np.empty(block, dtype=f32), np.empty(block, dtype=f32), np.empty(block, dtype=f32)
    for start in range(0, block, width):
        for i in range(width):
            tops[start + i], slopes[start + i] = top[i], beta[i]
    part = np.empty(wide if made else both, dtype=f32)
    for start in range(0, p.shape[1], BLOCK):
        count = min(BLOCK, p.shape[1] - start)
        if made:
            _exponentials(data, u64(start * wide), u64(count * width), tops, slopes, exponentials)
        for r in range(heads):
            _weighted(p[r], u64(start), u64(count), data, u64(start * wide), u64(wide), part)
            for i in range(part.size):
                sums[r, i] += part[i]
            if made:
                _weighted(p[r], u64(start), u64(count), exponentials, u64(0), u64(width), part)
                for i in range(width):
                    sums[r, width + i] += part[i]


@job
def _exponentials(data, at, count, tops, slopes, out):  # type: ignore[no-untyped-def]
    for i in range(count):
        out[i] = exp32(slopes[i] * (data[at + i] - tops[i]))


@job
def _weighted(p, first, count, rows, at, wide, part):  # type: ignore[no-untyped-def]
    """part = sum_s p[first + s] rows[at + wide s :]; four rows at a time, which saves loads and stores of part."""
    width = u64(part.size)
    for i in range(width):
        part[i] = f32(0.0)
    whole = count // FOUR * FOUR
    for s in range(u64(0), whole, FOUR):
        here = first + s
        a, b, c, d = p[here], p[here + ONE], p[here + TWO], p[here + THREE]
        w = at + s * wide
        x, y, z = w + wide, w + TWO * wide, w + THREE * wide
        for i in range(width):
            part[i] += a * rows[w + i] + b * rows[x + i] + c * rows[y + i] + d * rows[z + i]
    for s in range(whole, count):
        a, w = p[first + s], at + s * wide
        for i in range(width):
            part[i] += a * rows[w + i]
