"""Device code of the softmax read's backward: flash backward on the streams v and e = exp(beta (v - top)).

With F = top + log(total) / beta, the gradient of a row's total is g_F / (beta total) = g_F / beta exp(beta (top - F)).
`inner` forms it once per row, relative to the top that ROWS rows share; for ROWS keys whose top is lower it shrinks by
exp(beta (top of the keys - top of the rows)) <= 1, a factor per channel. Flagged rows take no part (their
log-normalizer is set to infinity): `triton_exact` adds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.softmax.triton_kernels import (
    DECAYS,
    GATE_STRIDES,
    INF,
    LOG2E,
    ROWS,
    SEGMENT_POINTERS,
    STRIDES,
    key_range,
    load_bias,
    load_block,
    load_block_columns,
    load_numbers,
    load_tile,
    place,
    visible,
)
from femixer.kernels.triton_math import rolled, softplus

# Channels of values that are multiplied at a time, where those of queries and keys are not multiplied all at once.
VALUES_APART = tl.constexpr(16)


@triton.jit
def load_top(tops, block, J, width, WIDTH: tl.constexpr):
    channel = tl.arange(0, WIDTH)
    return tl.load(tops + tl.minimum(block, J - 1) * width + channel, mask=channel < width, other=0)


@triton.jit(do_not_specialize=["T", "J", "P", "tiles", "H", "repeats", "offset", *GATE_STRIDES])
def inner(
    BY_MEAN, BY_FREE, MEAN, FREE, LOG_Z, FLAGS, BETAS, TOPS, LAMS, GATES,
    TO_MEAN, TO_TOTAL, DELTA, LOG_Z_USED, TO_LAM, TO_GATE, PARTS,
    T, J, P, tiles, H, repeats, offset, eps, lam_b, lam_t, lam_h, gate_b, gate_t, gate_h,
    BETA: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_FREE: tl.constexpr, GATED: tl.constexpr, LAM: tl.constexpr,
    GATE: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """Gradients of a row's sums, TO_MEAN and TO_TOTAL [B, H, T, D] (g_F / beta itself for flagged rows), their inner
    product with the sums DELTA [B, H, T], gradients of the gates, and of beta as far as F's logarithm has it.

    If GATED, BY_MEAN is the gradient of the gated read.
    """
    program = tl.program_id(0)
    pair = program // tiles
    tile = offset // TILE + program % tiles
    batch, head = pair // H, pair % H
    group = head // repeats
    channel = tl.arange(0, WIDTH)
    row = tile * TILE + tl.arange(0, TILE) - offset
    here = (row >= 0) & (row < T)
    inside = here[:, None] & (channel < width)[None, :]
    at = ((batch.to(tl.int64) * T + row) * H + head)[:, None] * width + channel[None, :]
    at_row = pair.to(tl.int64) * T + row
    log_z = tl.load(LOG_Z + at_row, mask=here, other=INF)
    some = (log_z < INF)[:, None]
    mean = tl.load(MEAN + at, mask=inside, other=0).to(tl.float32)
    by_mean = tl.zeros([TILE, WIDTH], tl.float32)
    by_free = by_mean
    free = mean
    if BETA:
        free = tl.load(FREE + at, mask=inside, other=0).to(tl.float32)
    if HAS_MEAN:
        by_mean = tl.load(BY_MEAN + at, mask=inside, other=0).to(tl.float32)
    if HAS_FREE:
        by_free = tl.load(BY_FREE + at, mask=inside, other=0).to(tl.float32)
    if GATED:
        by_read, read = by_mean, mean
        share = tl.zeros([TILE, WIDTH], tl.float32)
        if LAM:
            lam = load_tile(place(LAMS, batch, head, lam_b, lam_h, UNIT), row, T, lam_t, width, UNIT, WIDTH)
            share = tl.sigmoid(lam.to(tl.float32))
            read = mean + share * (free - mean)
        elif BETA:
            share += 1
            read = free
        if GATE:
            gate = load_tile(place(GATES, batch, head, gate_b, gate_h, UNIT), row, T, gate_t, width, UNIT, WIDTH)
            gate = tl.where((channel < width)[None, :], gate.to(tl.float32), -INF)
            positive = softplus(gate)
            inverse = tl.rsqrt(tl.sum(positive * positive, 1) / width + eps)[:, None]
            g = positive * inverse
            to_g = by_read * read
            # The norm takes out what points along g.
            along = tl.sum(to_g * g, 1)[:, None] / width
            to_gate = (to_g - g * along) * inverse * tl.sigmoid(gate)
            tl.store(TO_GATE + at, to_gate, mask=inside)
            by_read = by_read * g
        by_free = by_read * share
        by_mean = by_read - by_free
        if LAM:
            tl.store(TO_LAM + at, (free - mean) * by_mean * share, mask=inside)
    by_mean = tl.where(some, by_mean, 0.0)
    to_row = at_row[:, None] * width + channel[None, :]
    tl.store(TO_MEAN + to_row, by_mean.to(TO_MEAN.dtype.element_ty), mask=inside)
    delta = tl.sum(by_mean * mean, 1)
    if BETA:
        beta = tl.load(BETAS + group * width + channel, mask=channel < width, other=1).to(tl.float32)[None, :]
        tops = TOPS + (batch * (H // repeats) + group).to(tl.int64) * (J + 1) * width
        slope = tl.where(some & inside, by_free / beta, 0.0)
        delta += tl.sum(slope, 1)
        flagged = tl.load(FLAGS + at_row, mask=here, other=0) > 0
        top = load_top(tops, ((tile * TILE) // ROWS * ROWS + ROWS - 1) // KEYS, J, width, WIDTH)[None, :]
        counted = some & inside & (flagged == 0)[:, None]
        rise = tl.where(counted, beta * LOG2E * (top - free), 0.0)
        tl.store(TO_TOTAL + to_row, (slope * tl.exp2(rise)).to(TO_TOTAL.dtype.element_ty), mask=inside)
        log_z = tl.where(flagged, INF, log_z)
        reference = load_top(tops, J - 1, J, width, WIDTH)[None, :]
        to_beta = -tl.sum(tl.where(counted, slope * (free - reference), 0.0), 0)
        part = (batch * (H // repeats) + group).to(tl.int64) * P + head % repeats * tiles + program % tiles
        tl.store(PARTS + part * width + channel, to_beta, mask=channel < width)
    tl.store(DELTA + at_row, delta, mask=here)
    tl.store(LOG_Z_USED + at_row, log_z, mask=here)


@triton.jit
def products(
    rows, columns, row, column, count_m, count_n, stride_m, stride_n, width,
    UNIT: tl.constexpr, UNIT_N: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[M, N]: those of M tokens from `row` of one head with N tokens from `column` of another, CHANNELS at a time."""
    x = tl.zeros([M, N], tl.float32)
    for first in range(0, rolled(WIDTH, count_m), CHANNELS):
        a = load_block(rows + first, row, count_m, stride_m, width - first, UNIT, M, CHANNELS)
        b = load_block_columns(columns + first, column, count_n, stride_n, width - first, UNIT_N, N, CHANNELS)
        x = tl.dot(a, b, x, input_precision=PRECISION)
    return x


@triton.jit
def add_to_queries(
    TO_Q, ds, k, keys, row, T, H, first_key, S, scale, k_t, key_width,
    UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, APART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to TO_Q, of TILE rows of a head, what SIDE keys give by the gradients of their scores ds [N, M]: sums in
    memory, which other programs add to as well."""
    COLUMNS: tl.constexpr = APART if APART > 0 else KEY_WIDTH
    token, channel = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    here = (token >= -row) & (token < T - row)
    at = TO_Q + (tl.cast(row, tl.int64) + token)[:, None] * H * key_width + channel[None, :]
    by_rows = tl.trans(ds)
    if APART > 0:
        for first in range(0, rolled(KEY_WIDTH, T), APART):
            part = load_block(keys + first, first_key, S, k_t, key_width - first, UNIT, SIDE, APART)
            dq = tl.dot(by_rows.to(part.dtype), part, input_precision=PRECISION)
            inside = here[:, None] & (channel < key_width - first)[None, :]
            tl.atomic_add(at + first, dq * scale, mask=inside, sem="relaxed")
    else:
        dq = tl.dot(by_rows.to(k.dtype), k, input_precision=PRECISION)
        tl.atomic_add(at, dq * scale, mask=here[:, None] & (channel < key_width)[None, :], sem="relaxed")


@triton.jit
def join_rows(
    k, v, e, keys, values, queries, to_mean, to_total, log_zs, deltas, BIAS, SEG_Q, SEG_K, RANK, TO_Q, TO_BIAS,
    dk, dv, de, ds_sum, first_key, start, middle, stop, T, S, H, offset, window, scale, q_t, k_t, v_t, bias_t, bias_s,
    key_width, width,
    BETA: tl.constexpr, HAS_BIAS: tl.constexpr, SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, BIAS_GRAD: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, SIDE: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at positions from start to stop add to the gradients of keys, values and exponentials [N, E or D], where
    scores decay to the sums of their own [N], and in memory to those of queries and of their bias. Those from middle on
    see all keys."""
    key = first_key + tl.arange(0, SIDE)
    for first in range(start, stop, TILE):
        query = first + tl.arange(0, TILE)
        row = first - offset
        if APART > 0:
            x = products(
                keys, queries, first_key, row, S, T, k_t, q_t, key_width, UNIT, UNIT, KEY_WIDTH, SIDE, TILE, APART,
                PRECISION,
            )  # fmt: skip
        else:
            q = load_block(queries, row, T, q_t, key_width, UNIT, TILE, KEY_WIDTH)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        x *= scale * LOG2E
        if HAS_BIAS:
            x += load_bias(BIAS, query[None, :], key[:, None], offset, T, S, bias_t, bias_s, HAS_BIAS)
        if first < middle:
            seen = visible(
                query[None, :], key[:, None], SEG_Q, SEG_K, RANK, offset, T, S, window, CAUSAL, WINDOW, SEGMENTS
            )
            x = tl.where(seen, x, -INF)
        p = tl.exp2(x - load_numbers(log_zs, row, T, INF, TILE)[None, :])
        by_mean = load_block(to_mean, row, T, width, width, 1, TILE, WIDTH)
        dv = tl.dot(p.to(by_mean.dtype), by_mean, dv, input_precision=PRECISION)
        if APART > 0:
            dp = products(
                values, to_mean, first_key, row, S, T, v_t, width, width, UNIT, 1, WIDTH, SIDE, TILE, VALUES_APART,
                PRECISION,
            )  # fmt: skip
        else:
            dp = tl.dot(v, tl.trans(by_mean), input_precision=PRECISION)
        if BETA:
            by_total = load_block(to_total, row, T, width, width, 1, TILE, WIDTH)
            de = tl.dot(p.to(e.dtype), by_total, de, input_precision=PRECISION)
            factor = e
            if HAS_BIAS == DECAYS:
                if APART > 0 and KEY_WIDTH > APART:
                    factor = e * rolled(1, first)  # or its parts for the product would be held from before the loop
            dp = tl.dot(factor, tl.trans(by_total), dp, input_precision=PRECISION)
        ds = p * (dp - load_numbers(deltas, row, T, 0.0, TILE)[None, :])
        if APART > 0:
            q = load_block(queries, row, T, q_t, key_width, UNIT, TILE, KEY_WIDTH)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if HAS_BIAS == DECAYS:
            ds_sum += tl.sum(ds, 1)
        if BIAS_GRAD:
            at = (query - offset).to(tl.int64)[None, :]
            tl.store(TO_BIAS + at * S + key[:, None], ds, mask=(at >= 0) & (at < T) & (key < S)[:, None])
        if QUERIES:
            add_to_queries(
                TO_Q, ds, k, keys, row, T, H, first_key, S, scale, k_t, key_width, UNIT, KEY_WIDTH, TILE, SIDE, APART,
                PRECISION,
            )  # fmt: skip
    return dk, dv, de, ds_sum


@triton.jit
def exponentials(values, betas, key, top, S, v_t, width, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """exp(beta (v - top)) of keys, [N, D]; at most one for all that rows with this top see."""
    channel = tl.arange(0, WIDTH)
    slope = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32) * LOG2E
    v = load_tile(values, key, S, v_t, width, UNIT, WIDTH).to(tl.float32)
    return tl.exp2(slope[None, :] * tl.minimum(v - top[None, :], 0.0))


@triton.jit
def row_range(
    first, last, T, S, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Positions of the rows that may see keys from first to last, from a tile's start."""
    start, stop = first * 0 + offset, offset + T
    if CAUSAL:
        start = tl.maximum(start, first)
    if WINDOW and not SEGMENTS:
        start = tl.maximum(start, first - window + 1)
        stop = tl.minimum(stop, last + window)
    return start // TILE * TILE, stop


@triton.jit(
    do_not_specialize=["T", "S", "J", "P", "first_part", "tiles", "H", "repeats", "offset", "window", *STRIDES],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def to_keys(
    Q, K, V, BETAS, BIAS, SEG_Q, SEG_K, RANK, TOPS, TO_MEAN, TO_TOTAL, DELTA, LOG_Z, TO_K, TO_V, TO_SUMS, TO_Q, TO_BIAS,
    EXPS, PARTS, T, S, J, P, first_part, tiles, H, repeats, offset, window, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s, seg_q, seg_k,
    BETA: tl.constexpr, HAS_BIAS: tl.constexpr, SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, BIAS_GRAD: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, SIDE: tl.constexpr, KEYS: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
    key_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """TO_K [B, S, G, E], TO_V [B, S, G, D] of SIDE keys from all rows and heads that see them; PARTS of beta;
    TO_SUMS [B, H, S] of log decays: what the scores of a row give to the sum up to itself is zero in all, so this is
    what its key gives. With QUERIES also TO_Q [B, T, H, E], which programs add to in the order they come, and TO_BIAS
    [B, H, T, S]; without, for `to_queries`, EXPS [B, G, S, D], the exponentials relative to the top that ROWS keys
    share."""
    program = tl.program_id(0)
    pair, side = program // tiles, program % tiles
    G = H // repeats
    batch, group = pair // G, pair % G
    SEG_Q += batch.to(tl.int64) * seg_q
    SEG_K += batch.to(tl.int64) * seg_k
    RANK += batch.to(tl.int64) * S
    channel = tl.arange(0, WIDTH)
    key = side * SIDE + tl.arange(0, SIDE)
    values, betas = place(V, batch, group, v_b, v_h, UNIT), BETAS + group * width
    keys = place(K, batch, group, k_b, k_h, UNIT)
    k = load_tile(keys, key, S, k_t, key_width, UNIT, KEY_WIDTH)
    v = load_tile(values, key, S, v_t, width, UNIT, WIDTH)
    inside = (key < S)[:, None] & (channel < width)[None, :]
    tops = TOPS
    e = v.to(TO_TOTAL.dtype.element_ty)
    if BETA:
        tops = TOPS + pair.to(tl.int64) * (J + 1) * width
        top = load_top(tops, (side * SIDE // ROWS * ROWS + ROWS - 1) // KEYS, J, width, WIDTH)
        e = exponentials(values, betas, key, top, S, v_t, width, UNIT, WIDTH).to(e.dtype)
        if not QUERIES:
            tl.store(EXPS + (pair.to(tl.int64) * S + key)[:, None] * width + channel[None, :], e, mask=inside)
    dk = tl.zeros([SIDE, KEY_WIDTH], tl.float32)
    dv = tl.zeros([SIDE, WIDTH], tl.float32)
    to_beta = tl.zeros([WIDTH], tl.float32)
    start, stop = row_range(side * SIDE, side * SIDE + SIDE - 1, T, S, offset, window, CAUSAL, WINDOW, SEGMENTS, TILE)
    middle = stop
    if not WINDOW and not SEGMENTS:
        # Keys past the last one weigh nothing, which must not be left to what zeros score.
        middle = side * SIDE + SIDE - 1 if CAUSAL else tl.where(side * SIDE + SIDE <= S, start, stop)
    blocks = tl.cdiv(stop, ROWS) - start // ROWS
    for each in range(tl.maximum(repeats, 1)):  # at least one, as the compiler then knows
        head = group * repeats + each
        of_rows = (batch * H + head).to(tl.int64) * T
        queries = place(Q, batch, head, q_b, q_h, UNIT)
        to_q = TO_Q + (batch.to(tl.int64) * T * H + head) * key_width
        bias = BIAS + batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
        de = tl.zeros([SIDE, WIDTH], tl.float32)
        ds_sum = tl.zeros([SIDE], tl.float32)
        last_top = tl.zeros([WIDTH], tl.float32)
        # From the last rows, whose top is the highest, to the first: `de` is relative to the top of its rows.
        for block in range(blocks):
            first = (start // ROWS + blocks - 1 - block) * ROWS
            if BETA:
                top = load_top(tops, (first + ROWS - 1) // KEYS, J, width, WIDTH)
                slope = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32) * LOG2E
                de = de * tl.exp2(tl.where(block > 0, slope * (top - last_top), 0.0))[None, :]
                e = exponentials(values, betas, key, top, S, v_t, width, UNIT, WIDTH).to(e.dtype)
                last_top = top
            dk, dv, de, ds_sum = join_rows(
                k, v, e, keys, values, queries, TO_MEAN + of_rows * width, TO_TOTAL + of_rows * width, LOG_Z + of_rows,
                DELTA + of_rows, bias, SEG_Q, SEG_K, RANK, to_q, TO_BIAS + of_rows * S, dk, dv, de, ds_sum,
                side * SIDE, tl.maximum(start, first), middle, tl.minimum(stop, first + ROWS), T, S, H, offset, window,
                scale, q_t, k_t, v_t, bias_t, bias_s, key_width, width, BETA, HAS_BIAS, SEGMENTS, CAUSAL, WINDOW,
                QUERIES, BIAS_GRAD, UNIT, KEY_WIDTH, WIDTH, TILE, SIDE, APART, PRECISION,
            )  # fmt: skip
        if HAS_BIAS == DECAYS:
            tl.store(TO_SUMS + (batch * H + head).to(tl.int64) * S + key, -ds_sum, mask=key < S)
        if BETA:
            beta = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32)
            weighted = tl.where(inside, de * e.to(tl.float32), 0.0)
            dv += beta[None, :] * weighted
            reference = load_top(tops, J - 1, J, width, WIDTH)
            v = load_tile(values, key, S, v_t, width, UNIT, WIDTH)
            to_beta += tl.sum(weighted * (v.to(tl.float32) - reference[None, :]), 0)
    if HAS_BIAS == DECAYS:  # found again, or where results go would wait in registers from the beginning
        program = rolled(program, T)
        pair, side = program // tiles, program % tiles
        batch, group = pair // G, pair % G
        key = side * SIDE + tl.arange(0, SIDE)
        inside = (key < S)[:, None] & (channel < width)[None, :]
    token = (batch.to(tl.int64) * S + key) * G + group
    if BETA:
        part = pair.to(tl.int64) * P + first_part + side
        tl.store(PARTS + part * width + channel, to_beta, mask=channel < width)
    tl.store(TO_V + token[:, None] * width + channel[None, :], dv, mask=inside)
    wide = tl.arange(0, KEY_WIDTH)
    inside_key = (key < S)[:, None] & (wide < key_width)[None, :]
    tl.store(TO_K + token[:, None] * key_width + wide[None, :], dk * scale, mask=inside_key)


@triton.jit
def join_keys(
    q, by_mean, by_total, log_z, delta, queries, keys, values, exps, BIAS, SEG_Q, SEG_K, RANK, TO_BIAS, dq,
    first_row, start, middle, stop, T, S, offset, window, scale, q_t, k_t, v_t, bias_t, bias_s, key_width, width,
    BETA: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr, SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, SIDE: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys from start to stop add to the gradient of the queries [M, E], and have one of their score's bias. Those
    before middle are seen by all rows."""
    query = first_row + offset + tl.arange(0, TILE)
    for first in range(start, stop, SIDE):
        key = first + tl.arange(0, SIDE)
        if APART > 0:
            x = products(
                queries, keys, first_row, first, T, S, q_t, k_t, key_width, UNIT, UNIT, KEY_WIDTH, TILE, SIDE, APART,
                PRECISION,
            )  # fmt: skip
        else:
            k = load_block_columns(keys, first, S, k_t, key_width, UNIT, SIDE, KEY_WIDTH)
            x = tl.dot(q, k, input_precision=PRECISION)
        x *= scale * LOG2E
        if HAS_BIAS:
            x += load_bias(BIAS, query[:, None], key[None, :], offset, T, S, bias_t, bias_s, HAS_BIAS)
        if first >= middle:
            seen = visible(
                query[:, None], key[None, :], SEG_Q, SEG_K, RANK, offset, T, S, window, CAUSAL, WINDOW, SEGMENTS
            )
            x = tl.where(seen, x, -INF)
        p = tl.exp2(x - log_z[:, None])
        v = load_block_columns(values, first, S, v_t, width, UNIT, SIDE, WIDTH)
        dp = tl.dot(by_mean, v, input_precision=PRECISION)
        if BETA:
            e = load_block_columns(exps, first, S, width, width, 1, SIDE, WIDTH)
            dp = tl.dot(by_total, e, dp, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if BIAS_GRAD:
            row = (query - offset).to(tl.int64)
            inside = ((row >= 0) & (row < T))[:, None] & (key < S)[None, :]
            tl.store(TO_BIAS + row[:, None] * S + key[None, :], ds, mask=inside)
        k = load_block(keys, first, S, k_t, key_width, UNIT, SIDE, KEY_WIDTH)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(
    do_not_specialize=["T", "S", "J", "tiles", "H", "repeats", "offset", "window", *STRIDES],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def to_queries(
    Q, K, V, BETAS, BIAS, SEG_Q, SEG_K, RANK, TOPS, TO_MEAN, TO_TOTAL, DELTA, LOG_Z, EXPS, TO_Q, TO_BIAS,
    T, S, J, tiles, H, repeats, offset, window, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s, seg_q, seg_k,
    BETA: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr, SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SIDE: tl.constexpr, KEYS: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
    key_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """TO_Q [B, T, H, E] from all keys that rows see; TO_BIAS [B, H, T, S]."""
    program = tl.program_id(0)
    tile = offset // TILE + tiles - 1 - program % tiles
    pair = program // tiles
    batch, head = pair // H, pair % H
    group = head // repeats
    SEG_Q += batch.to(tl.int64) * seg_q
    SEG_K += batch.to(tl.int64) * seg_k
    RANK += batch.to(tl.int64) * S
    BIAS += batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
    query = tile * TILE + tl.arange(0, TILE)
    row = query - offset
    here = (row >= 0) & (row < T)
    of_rows = pair.to(tl.int64) * T
    to_bias = TO_BIAS + of_rows * S
    queries = place(Q, batch, head, q_b, q_h, UNIT)
    q = load_tile(queries, row, T, q_t, key_width, UNIT, KEY_WIDTH)
    by_mean = load_tile(TO_MEAN + of_rows * width, row, T, width, width, 1, WIDTH)
    log_z = tl.load(LOG_Z + of_rows + row, mask=here, other=INF)
    delta = tl.load(DELTA + of_rows + row, mask=here, other=0)
    channel = tl.arange(0, WIDTH)
    by_total = by_mean.to(TO_TOTAL.dtype.element_ty)
    tops, exps = TOPS, EXPS
    if BETA:
        of_keys = (batch * (H // repeats) + group).to(tl.int64)
        tops, exps = TOPS + of_keys * (J + 1) * width, EXPS + of_keys * S * width
    keys, values = place(K, batch, group, k_b, k_h, UNIT), place(V, batch, group, v_b, v_h, UNIT)
    dq = tl.zeros([TILE, KEY_WIDTH], tl.float32)
    start, stop = key_range(tile * TILE, tile * TILE + TILE - 1, S, offset, window, CAUSAL, WINDOW, SEGMENTS, SIDE)
    middle = start
    if not WINDOW and not SEGMENTS:
        middle = tl.minimum(tile * TILE, S) // SIDE * SIDE if CAUSAL else S // SIDE * SIDE
    for block in range(start // ROWS, tl.cdiv(stop, ROWS)):
        first = block * ROWS
        if BETA:
            slope = tl.load(BETAS + group * width + channel, mask=channel < width, other=1).to(tl.float32) * LOG2E
            top = load_top(tops, ((tile * TILE) // ROWS * ROWS + ROWS - 1) // KEYS, J, width, WIDTH)
            of_block = load_top(tops, (first + ROWS - 1) // KEYS, J, width, WIDTH)
            # At most one for all pairs that see each other.
            shrink = tl.exp2(tl.minimum(slope * (of_block - top), 0.0))
            by_total = load_tile(TO_TOTAL + of_rows * width, row, T, width, width, 1, WIDTH)
            by_total = (by_total * shrink[None, :]).to(TO_TOTAL.dtype.element_ty)
        dq = join_keys(
            q, by_mean, by_total, log_z, delta, queries, keys, values, exps, BIAS, SEG_Q, SEG_K, RANK, to_bias,
            dq, tile * TILE - offset, tl.maximum(start, first), middle, tl.minimum(stop, first + ROWS),
            T, S, offset, window, scale, q_t, k_t, v_t, bias_t, bias_s, key_width, width, BETA, HAS_BIAS, BIAS_GRAD,
            SEGMENTS, CAUSAL, WINDOW, UNIT, KEY_WIDTH, WIDTH, TILE, SIDE, APART, PRECISION,
        )  # fmt: skip
    wide = tl.arange(0, KEY_WIDTH)
    at = ((batch.to(tl.int64) * T + row) * H + head)[:, None] * key_width + wide[None, :]
    tl.store(TO_Q + at, dq * scale, mask=here[:, None] & (wide < key_width)[None, :])
