"""Compiled loops of the decayed linear read by matrix products, where a head has one gate or none, and its gradients.

The streams v and exp(beta (v - top)) lie side by side, with one shift `top` per channel and sequence. The sums show
where that shift leaves too little; such heads are counted as doubtful, and `numba_loops_tokens` reads them exactly.

One head of one sequence at a time, in chunks: all that a chunk needs stays in the cache. Its matrices are flat, row by
row, with zeros for tokens that are missing in the last chunk and for channels up to a multiple of four.

Arrays: q [B, T, H, E]; k [B, T, G, E]; gate [B, T, G, 1]; v [B, T, G, D]; beta [G, D]; marks [B, T]; mean, free
[B, T, H, D]; log_total [B, T, H]. Empty arrays stand for nothing. In a chunk x [C, W] are the streams v and
exp(beta (v - top)) - base side by side; base [D] is 1 in channels so narrow that the rounding of weights then cancels,
else 0.
"""

from __future__ import annotations

import math

import numpy as np

from femixer.kernels.marks import PADDING, START
from femixer.kernels.numba_kernel import job, summing, u64
from femixer.kernels.numba_math import exp, log
from femixer.kernels.streams import FAR_BELOW, NARROW, SMALL_BETA

CHUNK = u64(64)  # tokens, or fewer in a short sequence
WIPE = -1000.0  # a log decay that leaves nothing, and yet can be summed without losing the digits of others
ONE, FOUR = u64(1), u64(4)
# Where the first factor of a product is not zero.
ALL, LOWER, UPPER = range(3)


@job
def _add_product(c, a, along, across, b, rows, depth, width, where):  # type: ignore[no-untyped-def]
    """c [rows, width] += A b, where A[i, j] = a[i along + j across] and b [depth, width]."""
    for i in range(u64(0), rows, u64(2)):
        first = i // FOUR * FOUR if where == UPPER else u64(0)
        last = min(depth, i // FOUR * FOUR + FOUR) if where == LOWER else depth
        here, below = i * width, i * width + width
        for j in range(first, last, FOUR):
            at = i * along + j * across
            a0, a1, a2, a3 = a[at], a[at + across], a[at + across * u64(2)], a[at + across * u64(3)]
            at += along
            z0, z1, z2, z3 = a[at], a[at + across], a[at + across * u64(2)], a[at + across * u64(3)]
            r0, r1 = j * width, j * width + width
            r2, r3 = r1 + width, r1 + width * u64(2)
            for w in range(width):
                b0, b1, b2, b3 = b[r0 + w], b[r1 + w], b[r2 + w], b[r3 + w]
                c[here + w] += a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3
                c[below + w] += z0 * b0 + z1 * b1 + z2 * b2 + z3 * b3


@summing
def _inner(a, at, b, to, n):  # type: ignore[no-untyped-def]
    total = b.dtype.type(0.0)
    for i in range(n):
        total += a[at + i] * b[to + i]
    return total


@summing
def _sum(a, at, n):  # type: ignore[no-untyped-def]
    total = a.dtype.type(0.0)
    for i in range(n):
        total += a[at + i]
    return total


@job
def _scale_rows(size, a, factors, width):  # type: ignore[no-untyped-def]
    for t in range(size):
        factor = factors[t]
        for i in range(width):
            a[t * width + i] *= factor


@job
def _transpose(source, rows, width, target):  # type: ignore[no-untyped-def]
    for i in range(width):
        for t in range(rows):
            target[i * rows + t] = source[t * width + i]


@job
def _is_padding(marks, b, t):  # type: ignore[no-untyped-def]
    return marks.size > 0 and marks[b, t] & PADDING != 0


@job
def _load(size, source, b, h, start, marks, target, width):  # type: ignore[no-untyped-def]
    """A chunk of a head; padding is zero."""
    n, length = u64(source.shape[3]), u64(source.shape[1])
    target[:] = 0.0
    for t in range(min(size, length - start)):
        if _is_padding(marks, b, start + t):
            continue
        for i in range(n):
            target[t * width + i] = source[b, start + t, h, i]


@job
def _store(size, source, b, h, start, marks, target, width):  # type: ignore[no-untyped-def]
    """Back into a tensor of zeros; nothing is written to padding."""
    n, length = u64(target.shape[3]), u64(target.shape[1])
    for t in range(min(size, length - start)):
        if _is_padding(marks, b, start + t):
            continue
        for i in range(n):
            target[b, start + t, h, i] = source[t * width + i]


@job
def _shift(v, beta, marks, b, g, top, base):  # type: ignore[no-untyped-def]
    """Fill top and base [D]: the largest value of each channel that is not padding, and 1 in narrow channels. -> how
    many channels have too small a temperature for float32."""
    n, cold = u64(top.size), 0
    bottom = np.full(top.size, math.inf, top.dtype)
    top[:] = -math.inf
    for t in range(u64(v.shape[1])):
        if _is_padding(marks, b, t):
            continue
        for i in range(n):
            bottom[i] = min(bottom[i], v[b, t, g, i])
            top[i] = max(top[i], v[b, t, g, i])
    for i in range(n):
        if top[i] < bottom[i]:  # nothing but padding
            top[i], bottom[i] = 0.0, 0.0
        height = beta[g, i] * (top[i] - bottom[i])
        base[i] = 1.0 if height <= NARROW else 0.0
        cold += 1 if height > NARROW and beta[g, i] < SMALL_BETA else 0
    return cold


@job
def _load_streams(size, v, beta, top, base, b, g, start, marks, x, width):  # type: ignore[no-untyped-def]
    zero, n, length = v.dtype.type(0.0), u64(v.shape[3]), u64(v.shape[1])
    _load(size, v, b, g, start, marks, x, width)
    for t in range(min(size, length - start) if beta.size else u64(0)):
        row = t * width
        for i in range(n):
            # Padding may lie above top: its weight is zero, but its exponential must not overflow.
            x[row + n + i] = min(x[row + i] - top[i], zero) * beta[g, i]
        for i in range(n):
            x[row + n + i] = exp(x[row + n + i]) - np.float64(base[i])


@job
def _gate(gate, marks, b, t, g):  # type: ignore[no-untyped-def]
    if marks.size:
        if marks[b, t] & START:
            return WIPE
        if marks[b, t] & PADDING:
            return 0.0
    return np.float64(gate[b, t, g, 0]) if gate.size else 0.0


@job
def _decays(size, gate, marks, b, g, start, length, decay, into, out):  # type: ignore[no-untyped-def]
    """Decays from token i to token t >= i (decay [C, C]), from the chunk's beginning to t and from i to its end."""
    reach = np.zeros(into.size)
    total = 0.0
    for t in range(size):
        if start + t < length:
            total += _gate(gate, marks, b, start + t, g)
        reach[t] = total
    for t in range(size):
        into[t] = exp(into.dtype.type(reach[t]))
        out[t] = exp(into.dtype.type(total - reach[t]))
    for t in range(size):
        # In float64, because sums of strong gates leave no digits for weak ones.
        until = reach[t]
        for i in range(t + ONE):
            decay[t * size + i] = exp(into.dtype.type(until - reach[i]))


@job
def _weigh(size, scores, decay, gated, exclusive):  # type: ignore[no-untyped-def]
    """Decay the scores [C, C] of what a token sees; others are zero."""
    for t in range(size):
        seen = t if exclusive else t + ONE
        if gated:
            for i in range(seen):
                scores[t * size + i] *= decay[t * size + i]
        for i in range(seen, size):
            scores[t * size + i] = 0.0


@job
def forward_chunks(  # type: ignore[no-untyped-def]
    b, h, q, k, gate, v, beta, marks, exclusive, least, mean, free, log_total, doubts
):  # fmt: skip
    """doubts [B, H]: how many numbers overflow, have a sum below `least`, or an F far below top for its size."""
    length, d, g = u64(q.shape[1]), v.shape[3], h // (q.shape[2] // k.shape[2])
    gated = gate.size > 0 or marks.size > 0
    top, base = np.zeros(d, q.dtype), np.zeros(d, q.dtype)
    if beta.size:
        doubts[b, h] += _shift(v, beta, marks, b, g, top, base)
    size = min(CHUNK, _up_to_four(length))
    depth, width = _up_to_four(q.shape[3]), _up_to_four(d * 2 if beta.size else d)
    query, key, turned = _matrices(size, depth, q)
    x, y, _ = _matrices(size, width, q)
    scores, decay, _ = _matrices(size, size, q)
    into, out = np.ones(size, q.dtype), np.ones(size, q.dtype)
    # Sums over all chunks are in float64: they divide each other, and a small F is a difference of large numbers.
    state, written = np.zeros(depth * width, q.dtype), np.zeros(depth * width, q.dtype)
    states, totals = np.zeros(depth * width), np.zeros(depth)
    for start in range(u64(0), length, size):
        _load(size, q, b, h, start, marks, query, depth)
        _load(size, k, b, g, start, marks, key, depth)
        _load_streams(size, v, beta, top, base, b, g, start, marks, x, width)
        if gated:
            _decays(size, gate, marks, b, g, start, length, decay, into, out)
        _transpose(key, size, depth, turned)
        scores[:], y[:] = 0.0, 0.0
        _add_product(scores, query, depth, ONE, turned, size, depth, size, ALL)
        _weigh(size, scores, decay, gated, exclusive)
        _scale_rows(size, query, into, depth)
        _add_product(y, query, depth, ONE, state, size, depth, width, ALL)
        _add_product(y, scores, size, ONE, x, size, size, width, LOWER)
        for t in range(min(size, length - start)):
            total = _inner(query, t * depth, totals, u64(0), depth) + _sum(scores, t * size, size)
            nothing = total <= 0  # as for padding, of which the query is zero
            inverse = 0.0 if nothing else 1.0 / np.float64(total)
            log_total[b, start + t, h] = -math.inf if nothing else math.log(total)
            doubts[b, h] += _finish(y, t * width, inverse, beta, top, base, least, b, start + t, h, g, mean, free)
        _scale_rows(size, key, out, depth)
        whole = into[size - ONE]
        written[:] = 0.0
        _add_product(written, key, ONE, depth, x, depth, size, width, ALL)
        for i in range(depth * width):
            states[i] = states[i] * whole + written[i]
            state[i] = states[i]
        _add_rows(size, totals, whole, key, depth)


@job
def _matrices(size, width, like):  # type: ignore[no-untyped-def]
    """Three of [C, width]."""
    m = np.empty((3, size * width), like.dtype)
    return m[0], m[1], m[2]


@job
def _up_to_four(n):  # type: ignore[no-untyped-def]
    return (u64(n) + u64(3)) // FOUR * FOUR


@job
def _add_rows(size, totals, whole, a, width):  # type: ignore[no-untyped-def]
    for i in range(width):
        totals[i] *= whole
    for t in range(size):
        for i in range(width):
            totals[i] += a[t * width + i]


@job
def _finish(y, at, inverse, beta, top, base, least, b, t, h, g, mean, free):  # type: ignore[no-untyped-def]
    """Mean and free energy from the sums y[at:] of a token, and how many of them are not good enough."""
    n, doubts = u64(mean.shape[3]), 0
    for i in range(n):
        value = y[at + i] * inverse
        mean[b, t, h, i] = value
        doubts += 0 if abs(value) < math.inf else 1
    if not beta.size:
        return doubts
    for i in range(n):
        ratio = y[at + n + i] * inverse + np.float64(base[i])
        highest, average = np.float64(top[i]), np.float64(mean[b, t, h, i])
        value = highest + log(max(ratio, 1e-300)) / np.float64(beta[g, i])
        # Written so that NaN propagates.
        lost = value < average or average != average
        free[b, t, h, i] = (average if lost else value) if inverse > 0 else 0.0
        bad = ratio < least or highest - value > FAR_BELOW * max(abs(value), 1.0)
        doubts += 1 if bad and inverse > 0 else 0
    return doubts


@job
def backward_chunks(  # type: ignore[no-untyped-def]
    b, h, q, k, gate, v, beta, marks, exclusive, mean, free, log_total, to_mean, to_free, to_log,
    d_q, d_k, d_gate, d_v, d_beta,
):  # fmt: skip
    """d_q, d_k [B, T, H, E], d_gate [B, T, H], d_v [B, T, H, D], d_beta [B, H, D], zero before."""
    length, d, g = u64(q.shape[1]), v.shape[3], h // (q.shape[2] // k.shape[2])
    gated = gate.size > 0 or marks.size > 0
    top, base = np.zeros(d, q.dtype), np.zeros(d, q.dtype)
    if beta.size:
        _shift(v, beta, marks, b, g, top, base)
    size = min(CHUNK, _up_to_four(length))
    depth, width = _up_to_four(q.shape[3]), _up_to_four(d * 2 if beta.size else d)
    query, key, turned = _matrices(size, depth, q)
    past, future, _ = _matrices(size, depth, q)
    x, n, d_x = _matrices(size, width, q)
    scores, to_scores, decay = _matrices(size, size, q)
    turned_x, z = np.empty(size * width, q.dtype), np.zeros(size, q.dtype)
    into, out = np.ones(size, q.dtype), np.ones(size, q.dtype)
    after, before = np.zeros(size, q.dtype), np.zeros(size, q.dtype)
    # States [W, E] and [E] before every chunk, then the gradient of the state after it.
    chunks = int((length + size - ONE) // size)
    states, totals = np.zeros((chunks + 1, width * depth), q.dtype), np.zeros((chunks + 1, depth), q.dtype)
    for c in range(chunks):
        start, state, total = u64(c) * size, states[c + 1], totals[c + 1]
        _load(size, k, b, g, start, marks, key, depth)
        _load_streams(size, v, beta, top, base, b, g, start, marks, x, width)
        if gated:
            _decays(size, gate, marks, b, g, start, length, decay, into, out)
            _scale_rows(size, key, out, depth)
        whole = into[size - ONE]
        state[:], total[:] = states[c] * whole, totals[c]
        _add_product(state, x, ONE, width, key, width, size, depth, ALL)
        _add_rows(size, total, whole, key, depth)
    back, turned_back = np.zeros(width * depth, q.dtype), np.empty(width * depth, q.dtype)
    back_total = np.zeros(depth, q.dtype)
    for c in range(chunks - 1, -1, -1):
        start, state, total = u64(c) * size, states[c], totals[c]
        _load(size, q, b, h, start, marks, query, depth)
        _load(size, k, b, g, start, marks, key, depth)
        _load_streams(size, v, beta, top, base, b, g, start, marks, x, width)
        if gated:
            _decays(size, gate, marks, b, g, start, length, decay, into, out)
        whole = into[size - ONE]
        _to_sums(
            size, beta, top, base, mean, free, log_total, to_mean, to_free, to_log, b, h, g, start, n, z, width, d_beta
        )
        # Pairs within the chunk.
        _transpose(key, size, depth, turned)
        _transpose(x, size, width, turned_x)
        scores[:], to_scores[:] = 0.0, 0.0
        _add_product(scores, query, depth, ONE, turned, size, depth, size, ALL)
        _weigh(size, scores, decay, gated, exclusive)
        _add_product(to_scores, n, width, ONE, turned_x, size, width, size, ALL)
        _crossing(size, scores, to_scores, z, after)
        _weigh(size, to_scores, decay, gated, exclusive)
        # Reads of the past and writes to the future.
        past[:], future[:], d_x[:] = 0.0, 0.0, 0.0
        _add_product(past, n, width, ONE, state, size, width, depth, ALL)
        _add_product(future, x, width, ONE, back, size, width, depth, ALL)
        for t in range(size):
            for i in range(depth):
                past[t * depth + i] = (past[t * depth + i] + z[t] * total[i]) * into[t]
                future[t * depth + i] = (future[t * depth + i] + back_total[i]) * out[t]
            after[t] += _inner(past, t * depth, query, t * depth, depth)
            before[t] = _inner(future, t * depth, key, t * depth, depth)
        if gate.size:
            through = _inner(state, u64(0), back, u64(0), width * depth) + _inner(
                total, u64(0), back_total, u64(0), depth
            )
            _to_gates(size, gate, marks, after, before, through * whole, b, h, g, start, d_gate)
        _add_product(past, to_scores, size, ONE, key, size, size, depth, LOWER)
        _add_product(future, to_scores, ONE, size, query, size, size, depth, UPPER)
        _store(size, past, b, h, start, marks, d_q, depth)
        _store(size, future, b, h, start, marks, d_k, depth)
        _scale_rows(size, key, out, depth)
        _scale_rows(size, query, into, depth)
        _transpose(back, width, depth, turned_back)
        _add_product(d_x, scores, ONE, size, n, size, size, width, UPPER)
        _add_product(d_x, key, depth, ONE, turned_back, size, depth, width, ALL)
        _to_values(size, beta, top, base, marks, x, d_x, b, h, g, start, width, d_v, d_beta)
        for i in range(width * depth):
            back[i] *= whole
        _add_product(back, n, ONE, width, query, width, size, depth, ALL)
        _scale_rows(size, query, z, depth)
        _add_rows(size, back_total, whole, query, depth)


@job
def _to_sums(  # type: ignore[no-untyped-def]
    size, beta, top, base, mean, free, log_total, to_mean, to_free, to_log, b, h, g, start, n, z, width, d_beta
):  # fmt: skip
    """Gradients n [C, W] of the sums of the streams and z [C] of the total; of beta through the logarithm.

    mean = y_v / Z;   F = top + log(base + y_e / Z) / beta
    """
    d, length = u64(mean.shape[3]), u64(mean.shape[1])
    n[:], z[:] = 0.0, 0.0
    for s in range(min(size, length - start)):
        t, at = start + s, s * width
        if log_total[b, t, h] == -math.inf:
            continue
        total = np.float64(to_log[b, t, h])
        inverse = n.dtype.type(math.exp(-np.float64(log_total[b, t, h])))
        total -= _inner(to_mean[b, t, h], u64(0), mean[b, t, h], u64(0), d)
        for i in range(d):
            n[at + i] = to_mean[b, t, h, i] * inverse
        if beta.size:
            for i in range(d):
                slope, below = to_free[b, t, h, i] / beta[g, i], free[b, t, h, i] - top[i]
                d_beta[b, h, i] -= slope * below
                n[at + d + i] = below * beta[g, i]
            total -= _share(n, at + d, d, base, to_free, beta, b, t, h, g)
            for i in range(d):
                n[at + d + i] = to_free[b, t, h, i] / beta[g, i] * inverse / n.dtype.type(exp(n[at + d + i]))
        z[s] = total * inverse


@summing
def _share(exponents, at, d, base, to_free, beta, b, t, h, g):  # type: ignore[no-untyped-def]
    """The part of the gradient of F that goes through the total weight: sum of slope (1 - base exp(-exponent))."""
    share = 0.0
    for i in range(d):
        slope = np.float64(to_free[b, t, h, i] / beta[g, i])
        share += slope
    for i in range(d):
        slope = np.float64(to_free[b, t, h, i] / beta[g, i])
        share -= slope * np.float64(base[i]) / exp(exponents[at + i])
    return share


@job
def _crossing(size, scores, to_scores, z, after):  # type: ignore[no-untyped-def]
    """Add z to the gradients of the scores, and take the difference of what tokens read and what is read of them."""
    for t in range(size):
        after[t] = 0.0
    for t in range(size):
        at, more = t * size, z[t]
        for i in range(size):
            to_scores[at + i] += more
        after[t] += _inner(scores, at, to_scores, at, size)
        for i in range(size):
            after[i] -= scores[at + i] * to_scores[at + i]


@job
def _to_gates(size, gate, marks, after, before, through, b, h, g, start, d_gate):  # type: ignore[no-untyped-def]
    """What flows across a gate: pairs within the chunk and reads of the past after it, writes to the future before it,
    and what passes the whole chunk."""
    n = min(size, u64(gate.shape[1]) - start)
    flow = 0.0
    for s in range(n):
        t = n - ONE - s
        flow += after[t]
        after[t] = flow
        if _gate(gate, marks, b, start + t, g) <= WIPE:  # no rounding of one segment may reach another
            flow = 0.0
    flow = np.float64(through)
    for t in range(n):
        ends = _gate(gate, marks, b, start + t, g) <= WIPE
        d_gate[b, start + t, h] = 0.0 if ends or _is_padding(marks, b, start + t) else after[t] + flow
        flow += before[t]


@job
def _to_values(  # type: ignore[no-untyped-def]
    size, beta, top, base, marks, x, d_x, b, h, g, start, width, d_v, d_beta
):  # fmt: skip
    d, length = u64(d_v.shape[3]), u64(d_v.shape[1])
    for s in range(min(size, length - start)):
        t, at = start + s, s * width
        if _is_padding(marks, b, t):
            continue
        if beta.size:
            for i in range(d):
                x[at + d + i] += base[i]
            for i in range(d):
                weighted = d_x[at + d + i] * x[at + d + i]
                d_x[at + i] += weighted * beta[g, i]
                d_beta[b, h, i] += weighted * (x[at + i] - top[i])
        for i in range(d):
            d_v[b, t, h, i] = d_x[at + i]
