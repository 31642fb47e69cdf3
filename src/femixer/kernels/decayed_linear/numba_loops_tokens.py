"""Compiled loops of the decayed linear read, exact for values of any range: token by token, summed in float64.

Per key/value head the state S [E, W] is the sum of decayed k_i x_i with the stream x = (v, 1, exp(beta v - top)), so
W is 2 D + 1 (D + 1 without beta). top follows the largest exponent as it decays, per value channel, so that the sum of
exponentials neither over- nor underflows, whatever the values.

Arrays: q [B, T, H, E]; k [B, T, G, E]; gate [B, T, G, E or 1] log decays; v [B, T, G, D]; beta [G, D]; marks [B, T];
state [B, G, E, W], top [B, G, D] float64; mean, free [B, T, H, D]; log_total [B, T, H]. Empty arrays stand for nothing.
"""

from __future__ import annotations

import math

import numpy as np

from femixer.kernels.marks import PADDING, START
from femixer.kernels.numba_kernel import job
from femixer.kernels.numba_math import dot, exp, exp_wide, log

# Below this a total is nothing, and a sum of exponentials beyond sight; the free energy is then the mean.
TINY = 1e-290
NEAR = 40.0
# Where the largest exponential of a channel lies below this, top is lowered to what the rows really hold.
FADED = 1e-12
# The exponent of a token that is not there.
NOTHING = -1e300
# The largest gradient of a state.
MOST = 1e280


@job
def _stream(v, beta, gate, s, hidden, x, top, decays):  # type: ignore[no-untyped-def]
    """Fill the token's x [W] and, in `decays`, those of the state's rows for the streams v and 1 (decay [E]) and,
    relative to the slowest row, for the exponentials (slow [E], times fade [D] for the change of top). hidden: the
    token is not read now, so that its own exponent does not move top; `_enter` does."""
    decay, slow, fade = decays
    width, rows = v.shape[0], decay.shape[0]
    slowest = 0.0
    if gate.size == 1:
        slowest = np.float64(gate[0])
    elif gate.size:
        slowest = -math.inf
        for m in range(rows):
            slowest = max(slowest, np.float64(gate[m]))
    common = exp(v.dtype.type(slowest))
    if gate.size > 1:
        for m in range(rows):
            slow[m] = exp_wide(np.float64(gate[m]) - slowest, v[0])
    for m in range(rows):
        decay[m] = common * slow[m]
    for d in range(width):
        x[d] = v[d]
    x[width] = 1.0
    if not beta.size:
        return
    if gate.size > 1:
        _stream_by_row(v, beta, s, slow, slowest, common, hidden, x, top, fade)
        return
    for d in range(width):
        before, new = top[d], NOTHING if hidden else np.float64(beta[d]) * np.float64(v[d])
        old = before + slowest
        highest = max(old, new)
        fall, rest = before - highest, old - highest
        # The same rounded decay as the other streams have, wherever that does not overflow: in a narrow channel
        # only then the errors of the sums cancel.
        near = fall < NEAR
        factor = common if near else 1.0
        top[d] = highest
        fade[d] = factor * exp(v.dtype.type(fall if near else rest))
        x[width + 1 + d] = exp(v.dtype.type(new - highest))


@job
def _stream_by_row(v, beta, s, slow, slowest, common, hidden, x, top, fade):  # type: ignore[no-untyped-def]
    """The exponentials of x where every row has a gate of its own. The slowest row of a step need not be the one that
    holds the largest exponential: where gates alternate, all rows fade while the slowest of each step does not."""
    width = v.shape[0]
    first = width + 1
    held = np.zeros(width)
    for m in range(slow.shape[0]):
        rate = slow[m]
        for d in range(width):
            held[d] = max(held[d], s[m, first + d] * rate)
    for d in range(width):
        new, old, left = NOTHING if hidden else np.float64(beta[d]) * np.float64(v[d]), top[d] + slowest, held[d]
        if left >= FADED:
            highest = max(old, new)
            fall = top[d] - highest
            near = fall < NEAR
            fade[d] = common * exp_wide(fall, v[0]) if near else exp_wide(old - highest, v[0])
        elif left > TINY:
            old += math.log(left)
            highest = max(old, new)
            fade[d] = exp_wide(old - highest, v[0]) / left
        else:
            highest = new
            fade[d] = 0.0
        top[d] = highest
        x[first + d] = exp_wide(new - highest, v[0])


@job
def _enter(v, beta, x, top, fade):  # type: ignore[no-untyped-def]
    """The exponentials of x, and the factors fade [D] of those in the state, as the token is written."""
    width = v.shape[0]
    for d in range(fade.size):
        new = np.float64(beta[d]) * np.float64(v[d])
        highest = max(top[d], new)
        fade[d] = exp_wide(top[d] - highest, v[0])
        x[width + 1 + d] = exp_wide(new - highest, v[0])
        top[d] = highest


@job
def _scale(s, width, factors):  # type: ignore[no-untyped-def]
    for m in range(s.shape[0]):
        for d in range(factors.size):
            s[m, width + 1 + d] *= factors[d]


@job
def _largest(s, width, largest):  # type: ignore[no-untyped-def]
    """largest [D] of the exponentials of every channel; one where there are none."""
    for d in range(largest.size):
        most = 0.0
        for m in range(s.shape[0]):
            most = max(most, s[m, width + 1 + d])
        largest[d] = most if most > TINY else 1.0


@job
def _settle(s, width, top):  # type: ignore[no-untyped-def]
    """Make the largest exponential of every channel one: a state does not depend on how it was summed."""
    largest = np.empty(s.shape[1] - width - 1)
    _largest(s, width, largest)
    for d in range(largest.size):
        top[d] += math.log(largest[d])
    for m in range(s.shape[0]):
        for d in range(largest.size):
            s[m, width + 1 + d] /= largest[d]


# Rows of two-dimensional arrays are indexed in place, not taken as arrays of their own, which costs time.


@job
def _advance(s, k, x, decay, slow_decay, fade, add):  # type: ignore[no-untyped-def]
    """Decay the state, then (if add) write the token."""
    rows, width = s.shape
    plain = width - fade.shape[0]
    for m in range(rows):
        a, slow, key = decay[m], slow_decay[m], np.float64(k[m]) if add else 0.0
        for w in range(plain):
            s[m, w] = s[m, w] * a + key * x[w]
        for w in range(plain, width):
            s[m, w] = s[m, w] * (slow * fade[w - plain]) + key * x[w]


@job
def _write(s, k, x):  # type: ignore[no-untyped-def]
    rows, width = s.shape
    for m in range(rows):
        key = np.float64(k[m])
        for w in range(width):
            s[m, w] += key * x[w]


@job
def _sums(s, q, y):  # type: ignore[no-untyped-def]
    """y = q S"""
    rows, width = s.shape
    for w in range(width):
        y[w] = 0.0
    for m in range(rows):
        query = np.float64(q[m])
        for w in range(width):
            y[w] += query * s[m, w]


@job
def forward_tokens(  # type: ignore[no-untyped-def]
    b, g, q, k, gate, v, beta, marks, state, top, exclusive, mean, free, log_total, last, last_top
):  # fmt: skip
    """The state is written to last and last_top, which have the shapes of state and top."""
    length, width, rows = v.shape[1], v.shape[3], k.shape[3]
    repeats = q.shape[2] // v.shape[2]
    s, shift = last[b, g], last_top[b, g]
    if state.size:
        s[:] = state[b, g]
        shift[:] = top[b, g]
    else:
        s[:] = 0.0
        shift[:] = -math.inf
    total_width = s.shape[1]
    x, y = np.empty(total_width), np.empty(total_width)
    decay, slow, fade = np.ones(rows), np.ones(rows), np.ones(total_width - width - 1)
    decays = decay, slow, fade
    none = np.empty(0, v.dtype)
    for t in range(length):
        if marks.size and marks[b, t] & PADDING:
            mean[b, t, g * repeats : (g + 1) * repeats] = 0.0
            log_total[b, t, g * repeats : (g + 1) * repeats] = -math.inf
            if beta.size:
                free[b, t, g * repeats : (g + 1) * repeats] = 0.0
            continue
        if marks.size and marks[b, t] & START:
            s[:] = 0.0
            shift[:] = -math.inf
        temperature = beta[g] if beta.size else none
        _stream(v[b, t, g], temperature, gate[b, t, g] if gate.size else none, s, exclusive, x, shift, decays)
        _advance(s, k[b, t, g], x, decay, slow, fade, not exclusive)
        for h in range(g * repeats, (g + 1) * repeats):
            _sums(s, q[b, t, h], y)
            out, total = mean[b, t, h], y[width]
            if total <= TINY:  # written so that NaN propagates, here and below
                log_total[b, t, h] = -math.inf
                for d in range(width):
                    out[d] = 0.0
                    if beta.size:
                        free[b, t, h, d] = 0.0
                continue
            log_total[b, t, h] = math.log(total)
            for d in range(width):
                out[d] = y[d] / total
            if beta.size:
                energy = free[b, t, h]
                for d in range(width):
                    ratio = y[width + 1 + d] / total
                    value = (shift[d] + log(TINY if ratio <= TINY else ratio)) / np.float64(temperature[d])
                    average = y[d] / total
                    lost = ratio <= TINY or value < average or average != average
                    energy[d] = average if lost else value
        if exclusive:
            _enter(v[b, t, g], temperature, x, shift, fade)
            _scale(s, width, fade)
            _write(s, k[b, t, g], x)
    _settle(s, width, shift)


@job
def backward_tokens(  # type: ignore[no-untyped-def]
    b, g, q, k, gate, v, beta, marks, state, top, exclusive, to_mean, to_free, to_log, to_last,
    d_q, d_k, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    """Forwards once more for the gradient of q, which needs the state, then backwards with the state's gradient.

    The gradient of a gate is what flows across it: of all reads after it from all writes before it. That is the sum of
    q dq - k dk over what follows it.
    """
    length, width, rows = v.shape[1], v.shape[3], k.shape[3]
    repeats = q.shape[2] // v.shape[2]
    total_width = 2 * width + 1 if beta.size else width + 1
    energies = total_width - width - 1
    s, shift = np.zeros((rows, total_width)), np.full(width, -math.inf)
    if state.size:
        s[:] = state[b, g]
        shift[:] = top[b, g]
    y = np.empty(total_width)
    none = np.empty(0, v.dtype)
    # What the way back needs of every token: streams, decays, gradients of the sums.
    xs, to_sums = np.empty((length, total_width)), np.zeros((length, repeats, total_width))
    decays, slows, fades = np.ones((length, rows)), np.ones((length, rows)), np.ones((length, energies))
    enters = np.ones((length if exclusive else 0, energies))
    flow, reads = np.zeros(rows), np.zeros((length, rows))
    beta_sum, largest = np.zeros(width), np.ones(energies)
    for t in range(length):
        if marks.size and marks[b, t] & PADDING:
            continue
        if marks.size and marks[b, t] & START:
            s[:] = 0.0
            shift[:] = -math.inf
        temperature = beta[g] if beta.size else none
        x, steps = xs[t], (decays[t], slows[t], fades[t])
        _stream(v[b, t, g], temperature, gate[b, t, g] if gate.size else none, s, exclusive, x, shift, steps)
        _advance(s, k[b, t, g], x, decays[t], slows[t], fades[t], not exclusive)
        for r in range(repeats):
            h = g * repeats + r
            _sums(s, q[b, t, h], y)
            total, n = y[width], to_sums[t, r]
            if not total > TINY:
                for m in range(rows):
                    d_q[b, t, h, m] = 0.0
                continue
            common = np.float64(to_log[b, t, h])
            for d in range(width):
                to_m, average = np.float64(to_mean[b, t, h, d]), y[d] / total
                if beta.size:
                    to_f, ratio = np.float64(to_free[b, t, h, d]), y[width + 1 + d] / total
                    value = (shift[d] + math.log(ratio)) / temperature[d] if ratio > TINY else -math.inf
                    if value > average:
                        n[width + 1 + d] = to_f / (temperature[d] * y[width + 1 + d])
                        common -= to_f / temperature[d]
                        beta_sum[d] -= to_f * value / temperature[d]
                    else:
                        to_m += to_f
                n[d] = to_m / total
                common -= to_m * average
            n[width] = common / total
            for m in range(rows):
                gradient = dot(s, m, n)
                d_q[b, t, h, m] = gradient
                reads[t, m] += np.float64(q[b, t, h, m]) * gradient
        if exclusive:
            _enter(v[b, t, g], temperature, x, shift, enters[t])
            _scale(s, width, enters[t])
            _write(s, k[b, t, g], x)
    back = np.zeros(s.shape)
    if to_last.size:
        _largest(s, width, largest)
        back[:] = to_last[b, g]
        for m in range(rows):
            for d in range(energies):
                back[m, width + 1 + d] /= largest[d]
    for m in range(rows):
        flow[m] = dot(back, m, s[m])
    d_x = np.empty(total_width)
    for u in range(length):
        t = length - 1 - u
        if marks.size and marks[b, t] & PADDING:
            d_v[b, t, g] = 0.0
            d_k[b, t, g] = 0.0
            for h in range(g * repeats, (g + 1) * repeats):
                d_q[b, t, h] = 0.0
            if gate.size:
                d_gate[b, t, g] = 0.0
            continue
        if not exclusive:
            for r in range(repeats):
                _write(back, q[b, t, g * repeats + r], to_sums[t, r])
        _sums(back, k[b, t, g], d_x)
        x = xs[t]
        for m in range(rows):
            gradient = dot(back, m, x)
            d_k[b, t, g, m] = gradient
            flow[m] += reads[t, m] - np.float64(k[b, t, g, m]) * gradient
        if exclusive:
            _scale(back, width, enters[t])
            for r in range(repeats):
                _write(back, q[b, t, g * repeats + r], to_sums[t, r])
        for d in range(width):
            gradient = d_x[d]
            if beta.size:
                weighted = x[width + 1 + d] * d_x[width + 1 + d]
                gradient += beta[g, d] * weighted
                beta_sum[d] += v[b, t, g, d] * weighted
            d_v[b, t, g, d] = gradient
        if marks.size and marks[b, t] & START:
            back[:] = 0.0
            flow[:] = 0.0
        if gate.size:
            if gate.shape[3] == 1:
                d_gate[b, t, g, 0] = flow.sum()
            else:
                for m in range(rows):
                    d_gate[b, t, g, m] = flow[m]
        for m in range(rows):
            a, slow = decays[t, m], slows[t, m]
            for w in range(width + 1):
                back[m, w] *= a
            for w in range(width + 1, total_width):
                # Of a row that holds next to nothing the gradient may overflow as top falls.
                back[m, w] = min(max(back[m, w] * (slow * fades[t, w - width - 1]), -MOST), MOST)
    if d_state.size:
        d_state[b, g] = back
    if beta.size:
        d_beta[b, g] = beta_sum
