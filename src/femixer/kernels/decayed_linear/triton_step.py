"""Triton kernel of the decayed linear read for one token: the state is decayed, written and read in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.decayed_linear.triton_chunks import (
    BARELY,
    NOTHING,
    NUMBERS,
    STRONGEST,
    add_logs,
    exponentials,
    log_of,
    mix,
)
from femixer.kernels.decayed_linear.triton_forward import load_state, store_state
from femixer.kernels.triton_math import log1p


@triton.jit(do_not_specialize=NUMBERS)
def step(
    Q, K, GATE, V, BETA, MARKS, FIRST, TOP, MEAN, FREE, LOG, LAST, LAST_TOP, H, G, gated, marked,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, E: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    W: tl.constexpr, ENERGETIC: tl.constexpr, STATE: tl.constexpr, EXCLUSIVE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """All rows of BD value channels."""
    bg, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD
    b, g = bg // G, bg % G
    row = tl.arange(0, BE)
    column = first + tl.arange(0, BD)
    marks = tl.max(tl.load(MARKS + b + 0 * row, mask=row < BE * marked, other=0).to(tl.int32), 0)
    before = tl.full([BE], NOTHING, tl.float32)
    average, energy = tl.zeros([BE, BD], tl.float32), tl.zeros([BE, BD], tl.float32)
    if STATE:
        before, average, energy = load_state(FIRST, TOP, bg, first, E, D, BE, BD, ENERGETIC)
    before = tl.where((marks & 2) == 0, before, NOTHING)
    if W == 1:
        gate = tl.load(GATE + b * g_b + g * g_h + 0 * row, mask=row < E * gated, other=0).to(tl.float32)
    else:
        gate = tl.load(GATE + b * g_b + g * g_h + row, mask=row < E, other=0).to(tl.float32)
    before += tl.where((marks & 1) == 0, tl.maximum(gate, STRONGEST), 0.0)
    before = tl.where(before > BARELY, before, NOTHING)
    added = log_of(tl.load(K + b * k_b + g * k_h + row, mask=row < E, other=0).to(tl.float32))
    added = tl.where((marks & 1) == 0, added, NOTHING)
    v = tl.load(V + b * v_b + g * v_h + column, mask=column < D, other=0).to(tl.float32)
    v = tl.where((marks & 1) == 0, v, 0.0)
    beta = tl.full([BD], 1.0, tl.float32)
    if ENERGETIC:
        beta = tl.load(BETA + g * D + column, mask=column < D, other=1).to(tl.float32)
    weight = tl.where(tl.maximum(before, added) > BARELY, add_logs(before, added), NOTHING)
    old = tl.where(before > BARELY, before - weight, NOTHING)
    new = tl.where(added > BARELY, added - weight, NOTHING)
    new_average = tl.exp(old)[:, None] * average + tl.exp(new)[:, None] * v[None, :]
    z = (v * beta)[None, :]
    new_energy = tl.where((weight > BARELY)[:, None], mix(energy, old[:, None], z, new[:, None]), 0.0)
    if not EXCLUSIVE:
        average, energy, before = new_average, new_energy, weight
    for r in range(H // G):
        h = g * (H // G) + r
        q = log_of(tl.load(Q + b * q_b + h * q_h + row, mask=row < E, other=0).to(tl.float32)) + before
        q = tl.where((marks & 1) == 0, q, NOTHING)
        top = tl.max(q, 0)
        p = tl.where(q > BARELY, tl.exp(tl.minimum(q - top, 0.0)), 0.0)
        total = tl.sum(p, 0)
        p = p / tl.where(total > 0, total, 1.0)
        log_total = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
        mean = tl.sum(p[:, None] * average, 0)
        at = b * H + h
        tl.store(MEAN + at * D + column, mean, mask=column < D)
        tl.store(LOG + at + row, log_total, mask=row < tl.where(first == 0, 1, 0))
        if ENERGETIC:
            free = _log_mean_exp(p, energy) / beta
            free = tl.where(total > 0, tl.where(free >= mean, free, mean), 0.0)
            tl.store(FREE + at * D + column, free, mask=column < D)
    if KEEP:
        store_state(LAST, LAST_TOP, bg, first, weight, new_average, new_energy, E, D, BE, BD, ENERGETIC)


@triton.jit
def _log_mean_exp(p, energy):
    """log sum_m p[m] exp(energy[m]) [BD] at any range."""
    x, top, narrow = exponentials(energy, p > 0)
    close = top + log1p(tl.where(narrow, tl.sum(p[:, None] * x, 0), 0.0))
    terms = tl.where((p > 0)[:, None], log_of(p)[:, None] + energy, NOTHING)
    highest = tl.max(terms, 0)
    return tl.where(narrow, close, highest + tl.log(tl.sum(tl.exp(terms - highest[None, :]), 0)))
