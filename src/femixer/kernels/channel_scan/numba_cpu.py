"""The scan per channel as one compiled loop over time for a block of channels at a time.

Arrays: key, gate, v, mean, free, log_total [B, T, C]; beta [C]; marks [B, T] int8; state [3, B, C] float64: log total,
mean, free energy. Empty arrays stand for nothing: keys or gates of zero, no marks, the mean only.
Loops over channels are short and touch few arrays each, so that the compiler vectorises them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from femixer.kernels.marks import NO_MARKS, PADDING, START
from femixer.kernels.numba_kernel import inline, job, kernel, u64
from femixer.kernels.numba_math import exp, largest, log

FLOATS, STATES, FILLED = (torch.float32, torch.float64), ("state",), True
# Beyond these log odds a share is kept as a logarithm only: float32 exponentials end there.
DISTANT, TINY = 80.0, 1e-290
# Exponents above this would overflow float32.
FAR = 80.0
LANES = 128  # channels that one thread works on at a time
# Rows of the scratch array: what goes on from token to token, the token's own, and the temperatures.
TOTAL, MEAN, FREE, BEFORE, ODDS, FAR_ODDS, W, C, KEY, GATE, VALUE, WARM, COLD = range(13)
# The way back has more of them.
AT_TOTAL, AT_MEAN, AT_FREE, TO_TOTAL, TO_MEAN, TO_FREE, TO_ODDS, TO_KEY, TO_VALUE, READ, BETA_SUM, ROWS = range(13, 25)


def _complete(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The arguments with empty tensors for what is not there, and the state of no token."""
    key, gate, v, beta, marks, state = arguments
    if state is None:
        state = v.new_zeros(3, v.shape[0], v.shape[2], dtype=torch.float64)
        state[0] = -torch.inf
    key, gate = (v.new_empty(0, 0, 0) if x is None else x for x in (key, gate))
    return key, gate, v, v.new_empty(0) if beta is None else beta, NO_MARKS if marks is None else marks, state


def _like(v: Tensor, x: Tensor | None) -> Tensor:
    return v.new_empty(0, 0, 0) if x is None else v.new_empty(*v.shape)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = _complete(arguments)
    v, beta, state = given[2], arguments[3], given[5]
    mean, free, log_total, last = _like(v, v), _like(v, beta), _like(v, v), state.new_zeros(*state.shape)
    forward_kernel(*given, mean, free, log_total, last)
    return mean, free.flatten() if beta is None else free, log_total, last, v.new_empty(0)


def backward(
    grads: tuple[Tensor, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    key, gate, v, beta, *_ = arguments
    given = _complete(arguments)
    to_mean, to_free, to_log, to_last, *_ = grads
    mean, free, log_total = results[:3]
    if beta is None:
        free, to_free = _like(v, None), _like(v, None)
    d_key, d_gate, d_v, d_state = _like(v, key), _like(v, gate), _like(v, v), given[5].new_zeros(*given[5].shape)
    d_beta = d_state.new_zeros(*d_state.shape[1:])
    saved = (mean, free, log_total, to_mean, to_free, to_log, to_last)
    backward_kernel(*given, *saved, d_key, d_gate, d_v, d_beta, d_state)
    to_beta = None if beta is None else d_beta.sum(0).to(beta.dtype)
    gradients = d_key, d_gate, d_v, to_beta, None, d_state
    return tuple(None if x is None else found for x, found in zip(arguments, gradients, strict=True))


@kernel
def forward_kernel(key, gate, v, beta, marks, state, mean, free, log_total, last):  # type: ignore[no-untyped-def]
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _forward(index // blocks, index % blocks * LANES, key, gate, v, beta, marks, state, mean, free, log_total, last)


@job
def _forward(b, low, key, gate, v, beta, marks, state, mean, free, log_total, last):  # type: ignore[no-untyped-def]
    """With w and c = 1 - w the shares of a token and of its past, a prime marking the row before:

    log(w / c) = key - gate - log total',   mean = c mean' + w v,   exp(beta F) = c exp(beta F') + w exp(beta v)
    """
    length, n, low = v.shape[1], u64(min(LANES, v.shape[2] - low)), u64(low)
    # One array, so that the compiler sees that its rows do not overlap.
    r = np.zeros((13, LANES))
    r[TOTAL] = -math.inf
    r[WARM] = 1.0
    for i in range(n):
        r[TOTAL, i], r[MEAN, i] = state[0, b, low + i], state[1, b, low + i]
        if beta.size:
            r[FREE, i], r[WARM, i] = state[2, b, low + i], beta[low + i]
    r[COLD] = 1.0 / r[WARM]
    for t in range(length):
        if marks.size:
            if marks[b, t] & PADDING:
                for i in range(n):
                    mean[b, t, low + i] = 0.0
                    log_total[b, t, low + i] = 0.0
                    if beta.size:
                        free[b, t, low + i] = 0.0
                continue
            if marks[b, t] & START:
                r[TOTAL], r[MEAN], r[FREE] = -math.inf, 0.0, 0.0
        _fetch(v, b, t, low, n, r, VALUE)
        _fetch(key, b, t, low, n, r, KEY)
        _fetch(gate, b, t, low, n, r, GATE)
        _advance(r, v, beta.size > 0)
        if beta.size:
            if largest(r[FAR_ODDS]) > DISTANT:
                _far(r, n)
            for i in range(n):
                free[b, t, low + i] = max(r[FREE, i], r[MEAN, i])
        for i in range(n):
            mean[b, t, low + i] = r[MEAN, i]
        for i in range(n):
            log_total[b, t, low + i] = r[TOTAL, i]
    for i in range(n):
        last[0, b, low + i], last[1, b, low + i] = r[TOTAL, i], r[MEAN, i]
        if beta.size:
            last[2, b, low + i] = r[FREE, i]


@job
def _far(r, n):  # type: ignore[no-untyped-def]
    """A share too small for a product can still belong to the larger term."""
    for i in range(n):
        odds = r[ODDS, i]
        if r[FAR_ODDS, i] > DISTANT:
            new, old = r[WARM, i] * r[VALUE, i] + min(odds, 0.0), r[WARM, i] * r[BEFORE, i] - max(odds, 0.0)
            r[FREE, i] = (max(old, new) + math.log1p(math.exp(-abs(new - old)))) * r[COLD, i]


@job
def _advance(r, v, energies):  # type: ignore[no-untyped-def]
    """Go on by the token whose key, gate and value are in r. All lanes, also unused ones: a fixed number."""
    for i in range(LANES):
        # Whatever is loaded is loaded first: a load inside a condition could not be vectorised.
        value, key, old = r[VALUE, i], r[KEY, i], r[TOTAL, i] + r[GATE, i]
        odds = key - old
        factor = exp(v.dtype.type(-abs(odds)))
        inverse = 1.0 / (1.0 + factor)
        newer, rest = inverse, factor * inverse
        w = newer if odds > 0 else rest
        c = rest if odds > 0 else newer
        r[TOTAL, i] = max(old, key) + log(1.0 + factor)
        r[MEAN, i] = c * r[MEAN, i] + w * value
        r[ODDS, i] = odds
        r[FAR_ODDS, i] = abs(odds) if old > -math.inf else 0.0
        r[W, i] = w
        r[C, i] = c
    if not energies:
        return
    for i in range(LANES):
        value, before, w, c = r[VALUE, i], r[FREE, i], r[W, i], r[C, i]
        rise = r[WARM, i] * (value - before)
        ahead = r[ODDS, i] + rise
        # Relative to the larger of the two terms. The other one's exponent is large only where its share is small, and
        # is then taken from the odds.
        base = w if ahead > 0 else c
        other = c if ahead > 0 else w
        exponent = -rise if ahead > 0 else rise
        from_odds = -abs(ahead)
        amount = base if exponent > FAR else other
        exponent = from_odds if exponent > FAR else exponent
        reference = value if ahead > 0 else before
        r[BEFORE, i] = before
        r[FREE, i] = reference + r[COLD, i] * log(max(base + amount * exp(v.dtype.type(exponent)), TINY))


@kernel
def backward_kernel(  # type: ignore[no-untyped-def]
    key, gate, v, beta, marks, state, mean, free, log_total,
    to_mean, to_free, to_log, to_last, d_key, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    blocks = (v.shape[2] + LANES - 1) // LANES
    for index in prange(v.shape[0] * blocks):
        _backward(
            index // blocks, index % blocks * LANES, key, gate, v, beta, marks, state, mean, free, log_total,
            to_mean, to_free, to_log, to_last, d_key, d_gate, d_v, d_beta, d_state,
        )  # fmt: skip


@job
def _backward(  # type: ignore[no-untyped-def]
    b, low, key, gate, v, beta, marks, state, mean, free, log_total,
    to_mean, to_free, to_log, to_last, d_key, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    """With w and c = 1 - w the shares of the newest token and of the past in the prior, r and o those in the posterior:

    mean = c mean' + w v,   d log total = c d(log total' + gate) + w d key,   dF = o dF' + r dv + (r - w) dx / beta

    with x = key - gate - log total' the log odds of w; a prime marks the row before, and is what MEAN, FREE and TOTAL
    hold here. AT_ are the gradients of what goes on to the next row, TO_ those of a token's own.
    """
    length, n, low = v.shape[1], u64(min(LANES, v.shape[2] - low)), u64(low)
    r = np.zeros((ROWS, LANES))
    for i in range(n):
        r[AT_TOTAL, i], r[AT_MEAN, i] = to_last[0, b, low + i], to_last[1, b, low + i]
        r[WARM, i] = beta[low + i] if beta.size else 1.0
        r[COLD, i] = 1.0 / r[WARM, i]
        if beta.size:
            r[AT_FREE, i] = to_last[2, b, low + i]
    for u in range(length):
        t = length - 1 - u
        if marks.size and marks[b, t] & PADDING:
            for i in range(n):
                d_v[b, t, low + i] = 0.0
                if key.size:
                    d_key[b, t, low + i] = 0.0
                if gate.size:
                    d_gate[b, t, low + i] = 0.0
            continue
        before = t - 1
        if marks.size:
            while before >= 0 and marks[b, before] & PADDING:
                before -= 1
        if marks.size and marks[b, t] & START:
            r[TOTAL], r[MEAN], r[FREE] = -math.inf, 0.0, 0.0
        elif before < 0:
            for i in range(n):
                r[TOTAL, i], r[MEAN, i] = state[0, b, low + i], state[1, b, low + i]
                if beta.size:
                    r[FREE, i] = state[2, b, low + i]
        else:
            _fetch(log_total, b, before, low, n, r, TOTAL)
            _fetch(mean, b, before, low, n, r, MEAN)
            _fetch(free, b, before, low, n, r, FREE)
        _fetch(v, b, t, low, n, r, VALUE)
        _fetch(key, b, t, low, n, r, KEY)
        _fetch(gate, b, t, low, n, r, GATE)
        _fetch(free, b, t, low, n, r, READ)
        _fetch(to_mean, b, t, low, n, r, TO_MEAN)
        _fetch(to_log, b, t, low, n, r, TO_TOTAL)
        _fetch(to_free, b, t, low, n, r, TO_FREE)
        _retreat(r, n, v, beta.size > 0)
        for i in range(n):
            d_v[b, t, low + i] = r[TO_VALUE, i]
        if key.size:
            for i in range(n):
                d_key[b, t, low + i] = r[TO_KEY, i]
        if gate.size:
            for i in range(n):
                d_gate[b, t, low + i] = r[AT_TOTAL, i]
    for i in range(n):
        d_state[0, b, low + i], d_state[1, b, low + i] = r[AT_TOTAL, i], r[AT_MEAN, i]
        if beta.size:
            d_state[2, b, low + i], d_beta[b, low + i] = r[AT_FREE, i], r[BETA_SUM, i]


@inline
def _fetch(source, b, t, low, n, r, row):  # type: ignore[no-untyped-def]
    """A token's part of what there is."""
    if source.size:
        for i in range(n):
            r[row, i] = source[b, t, low + i]


@job
def _retreat(r, n, v, energies):  # type: ignore[no-untyped-def]
    """Go back by the token whose key, gate and value are in r, with the results of the row before."""
    for i in range(n):
        odds = r[KEY, i] - r[GATE, i] - r[TOTAL, i]
        factor = exp(v.dtype.type(-abs(odds)))
        inverse = 1.0 / (1.0 + factor)
        newer, rest = inverse, factor * inverse
        r[ODDS, i] = odds
        r[W, i] = newer if odds > 0 else rest
        r[C, i] = rest if odds > 0 else newer
    for i in range(n):
        at_mean, w, c = r[AT_MEAN, i] + r[TO_MEAN, i], r[W, i], r[C, i]
        r[TO_ODDS, i] = at_mean * w * c * (r[VALUE, i] - r[MEAN, i])
        r[TO_VALUE, i] = w * at_mean
        r[AT_MEAN, i] = c * at_mean
    if energies:
        for i in range(n):
            value, last, now = r[VALUE, i], r[FREE, i], r[READ, i]
            odds = r[ODDS, i] + r[WARM, i] * (value - last)
            factor = exp(v.dtype.type(-abs(odds)))
            inverse = 1.0 / (1.0 + factor)
            newer, rest = inverse, factor * inverse
            share = newer if odds > 0 else rest
            other = rest if odds > 0 else newer
            at_free = r[AT_FREE, i] + r[TO_FREE, i]
            cold = at_free * r[COLD, i]
            r[TO_ODDS, i] += cold * (share - r[W, i])
            r[TO_VALUE, i] += share * at_free
            r[BETA_SUM, i] += cold * (share * (value - now) + other * (last - now))
            r[AT_FREE, i] = other * at_free
    for i in range(n):
        at_total, to_odds = r[AT_TOTAL, i] + r[TO_TOTAL, i], r[TO_ODDS, i]
        r[TO_KEY, i] = r[W, i] * at_total + to_odds
        r[AT_TOTAL, i] = r[C, i] * at_total - to_odds
