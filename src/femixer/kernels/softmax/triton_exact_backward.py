"""Device code of the gradients of flagged rows, one key and channel at a time, from the posterior itself:

    r = p exp(beta (v - F)),   dF/dv = r,   dF/dscore = (r - p) / beta,   dF/dbeta = (E_r[v] - F) / beta

F is rounded, so r sums to exp(beta (F - rounded F)): rows are divided by that sum first. Programs leave at once where
no row is flagged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.softmax.triton_exact import CHANNELS, FAR_AWAY, SEEN, SIDE, load_chunk, scores, seen_range
from femixer.kernels.softmax.triton_kernels import INF, LOG2E, SEGMENT_POINTERS, STRIDES, load_columns, load_tile, place


@triton.jit
def flagged_log_z(FLAGS, LOG_Z, row, T):
    """Log-normalizers of flagged rows, infinite for others, so that their weights are zero; and whether one is."""
    here = (row >= 0) & (row < T)
    flagged = tl.load(FLAGS + row, mask=here, other=0) > 0
    return tl.load(LOG_Z + row, mask=flagged, other=INF), tl.max(flagged.to(tl.int32), 0) > 0


@triton.jit
def add(places, more, inside):
    before = tl.load(places, mask=inside, other=0).to(tl.float32)
    tl.store(places, before + more, mask=inside)


@triton.jit
def posterior(log_p, values, frees, betas, key, row, S, T, v_t, free_t, first, width, UNIT: tl.constexpr):
    """[rows, keys, CHANNELS] of the channels from `first`."""
    channel = first + tl.arange(0, CHANNELS)
    slope = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32) * LOG2E
    v = load_chunk(values, key, S, v_t, first, width, UNIT)
    free = load_chunk(frees, row, T, free_t, first, width, 1)
    return tl.exp2(log_p[:, :, None] + slope[None, None, :] * (v[None, :, :] - free[:, None, :]))


@triton.jit
def score_gradient(
    log_p, values, frees, betas, to_mean, to_total, deltas, key, row, S, T, v_t, free_t, width,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, keys]: p (g_mu v - delta) + sum over channels of r g_F / beta."""
    by_mean = load_tile(to_mean, row, T, width, width, 1, WIDTH)
    v = load_columns(values, key, S, v_t, width, UNIT, WIDTH)
    dp = tl.dot(by_mean, v, input_precision=PRECISION)
    delta = tl.load(deltas + row, mask=(row >= 0) & (row < T), other=0)
    ds = tl.exp2(log_p) * (dp - delta[:, None])
    for first in range(0, width, CHANNELS):
        r = posterior(log_p, values, frees, betas, key, row, S, T, v_t, free_t, first, width, UNIT)
        by_total = load_chunk(to_total, row, T, width, first, width, 1)
        ds += tl.sum(r * by_total[:, None, :], 2)
    return ds


@triton.jit(
    do_not_specialize=["T", "S", "P", "tiles", "H", "repeats", "offset", *SEEN, *STRIDES],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def flagged_rows(
    Q, K, V, BETAS, BIAS, SEG_Q, SEG_K, RANK, FREE, FLAGS, LOG_Z, TO_MEAN, TO_TOTAL, DELTA, TO_Q, TO_BIAS, PARTS,
    T, S, P, tiles, H, repeats, offset, dense, decays, causal, segmented, ranked, window, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s, seg_q, seg_k,
    BIAS_GRAD: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    key_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write TO_Q and TO_BIAS of flagged rows, and their PARTS of beta; divide their TO_TOTAL by the sum of r."""
    program = tl.program_id(0)
    seen = (dense, decays, causal, segmented, ranked, window)
    pair = program // tiles
    batch, head = pair // H, pair % H
    group = head // repeats
    row = program % tiles * SIDE + tl.arange(0, SIDE)
    of_rows = pair.to(tl.int64) * T
    part = (batch * (H // repeats) + group + 1).to(tl.int64) * P - (head % repeats + 1) * tiles + program % tiles
    log_z, some = flagged_log_z(FLAGS + of_rows, LOG_Z + of_rows, row, T)
    if some:
        SEG_Q += batch.to(tl.int64) * seg_q
        SEG_K += batch.to(tl.int64) * seg_k
        RANK += batch.to(tl.int64) * S
        BIAS += batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
        query = row + offset
        queries = place(Q, batch, head, q_b, q_h, UNIT)
        keys, values = place(K, batch, group, k_b, k_h, UNIT), place(V, batch, group, v_b, v_h, UNIT)
        frees = FREE + (batch.to(tl.int64) * T * H + head) * width
        betas, to_total = BETAS + group * width, TO_TOTAL + of_rows * width
        start, stop = seen_range(tl.min(query, 0), tl.max(query, 0), S, causal, segmented, window)
        for first in range(0, width, CHANNELS):
            total = tl.zeros([SIDE, CHANNELS], tl.float32)
            above = tl.zeros([SIDE, CHANNELS], tl.float32)
            free = load_chunk(frees, row, T, H * width, first, width, 1)
            for block in range(start, stop, SIDE):
                key = block + tl.arange(0, SIDE)
                x = scores(
                    queries, keys, BIAS, SEG_Q, SEG_K, RANK, query, key, T, S, offset, seen, scale, q_t, k_t, bias_t,
                    bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
                )  # fmt: skip
                r = posterior(
                    x - log_z[:, None], values, frees, betas, key, row, S, T, v_t, H * width, first, width, UNIT
                )
                v = load_chunk(values, key, S, v_t, first, width, UNIT)
                total += tl.sum(r, 1)
                above += tl.sum(r * (v[None, :, :] - free[:, None, :]), 1)
            channel = first + tl.arange(0, CHANNELS)
            inside = (log_z < INF)[:, None] & (channel < width)[None, :]
            total = tl.where(inside & (total > 0), total, 1.0)
            by_total = load_chunk(to_total, row, T, width, first, width, 1) / total
            tl.store(to_total + row.to(tl.int64)[:, None] * width + channel[None, :], by_total, mask=inside)
            beta = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32)[None, :]
            to_beta = tl.where(inside, by_total * total * (above / total - tl.log(total) / beta), 0.0)
            tl.store(PARTS + part * width + channel, tl.sum(to_beta, 0), mask=channel < width)
        tl.debug_barrier()
        dq = tl.zeros([SIDE, KEY_WIDTH], tl.float32)
        for block in range(start, stop, SIDE):
            key = block + tl.arange(0, SIDE)
            x = scores(
                queries, keys, BIAS, SEG_Q, SEG_K, RANK, query, key, T, S, offset, seen, scale, q_t, k_t, bias_t,
                bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
            )  # fmt: skip
            ds = score_gradient(
                x - log_z[:, None], values, frees, betas, TO_MEAN + of_rows * width, to_total, DELTA + of_rows,
                key, row, S, T, v_t, H * width, width, UNIT, WIDTH, PRECISION,
            )  # fmt: skip
            if BIAS_GRAD:
                inside = (log_z < INF)[:, None] & (key < S)[None, :]
                tl.store(TO_BIAS + (of_rows + row)[:, None] * S + key[None, :], ds, mask=inside)
            k = load_tile(keys, key, S, k_t, key_width, UNIT, KEY_WIDTH)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        wide = tl.arange(0, KEY_WIDTH)
        at = ((batch.to(tl.int64) * T + row) * H + head)[:, None] * key_width + wide[None, :]
        tl.store(TO_Q + at, dq * scale, mask=(log_z < INF)[:, None] & (wide < key_width)[None, :])
    else:
        channel = tl.arange(0, WIDTH)
        tl.store(PARTS + part * width + channel, tl.zeros([WIDTH], tl.float32), mask=channel < width)


@triton.jit(
    do_not_specialize=["T", "S", "tiles", "H", "repeats", "offset", *SEEN, *STRIDES],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def flagged_keys(
    Q, K, V, BETAS, BIAS, SEG_Q, SEG_K, RANK, FREE, FLAGS, LOG_Z, TO_MEAN, TO_TOTAL, DELTA, TO_K, TO_V, TO_SUMS,
    T, S, tiles, H, repeats, offset, dense, decays, causal, segmented, ranked, window, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s, seg_q, seg_k,
    UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    key_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Add to TO_K, TO_V and TO_SUMS of BLOCK keys what flagged rows give."""
    program = tl.program_id(0)
    seen = (dense, decays, causal, segmented, ranked, window)
    G = H // repeats
    pair, tile = program // tiles, program % tiles
    batch, group = pair // G, pair % G
    near = window + segmented * FAR_AWAY
    start = tl.maximum(offset, tl.maximum(tile * BLOCK * causal, tile * BLOCK - near + 1)) // SIDE * SIDE
    stop = tl.minimum(offset + T, tile * BLOCK + BLOCK - 1 + near)
    found = tl.zeros([1024], tl.int32)
    for each in range(repeats):
        flags = FLAGS + (batch * H + group * repeats + each).to(tl.int64) * T
        for first in range(start, stop, 1024):
            row = first - offset + tl.arange(0, 1024)
            found = tl.maximum(found, tl.load(flags + row, mask=(row >= 0) & (row < T), other=0).to(tl.int32))
    if tl.max(found, 0) > 0:
        SEG_Q += batch.to(tl.int64) * seg_q
        SEG_K += batch.to(tl.int64) * seg_k
        RANK += batch.to(tl.int64) * S
        keys, values = place(K, batch, group, k_b, k_h, UNIT), place(V, batch, group, v_b, v_h, UNIT)
        betas = BETAS + group * width
        for side in range(BLOCK // SIDE):
            key = tile * BLOCK + side * SIDE + tl.arange(0, SIDE)
            dk = tl.zeros([SIDE, KEY_WIDTH], tl.float32)
            for each in range(repeats):
                head = group * repeats + each
                of_rows = (batch * H + head).to(tl.int64) * T
                queries = place(Q, batch, head, q_b, q_h, UNIT)
                frees = FREE + (batch.to(tl.int64) * T * H + head) * width
                bias = BIAS + batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
                to_sums = tl.zeros([SIDE], tl.float32)
                for first in range(start, stop, SIDE):
                    row = first - offset + tl.arange(0, SIDE)
                    log_z, some = flagged_log_z(FLAGS + of_rows, LOG_Z + of_rows, row, T)
                    if some:
                        q = load_tile(queries, row, T, q_t, key_width, UNIT, KEY_WIDTH)
                        x = scores(
                            queries, keys, bias, SEG_Q, SEG_K, RANK, row + offset, key, T, S, offset, seen, scale,
                            q_t, k_t, bias_t, bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
                        )  # fmt: skip
                        ds = score_gradient(
                            x - log_z[:, None], values, frees, betas, TO_MEAN + of_rows * width,
                            TO_TOTAL + of_rows * width, DELTA + of_rows, key, row, S, T, v_t, H * width, width,
                            UNIT, WIDTH, PRECISION,
                        )  # fmt: skip
                        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
                        to_sums -= tl.sum(ds, 0)
                add(TO_SUMS + (batch * H + head).to(tl.int64) * S + key, to_sums, key < S * decays)
            wide = tl.arange(0, KEY_WIDTH)
            token = (batch.to(tl.int64) * S + key) * G + group
            add(
                TO_K + token[:, None] * key_width + wide[None, :],
                dk * scale,
                (key < S)[:, None] & (wide < key_width)[None, :],
            )
            for part in range(0, width, CHANNELS):
                channel = part + tl.arange(0, CHANNELS)
                beta = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32)
                dv = tl.zeros([SIDE, CHANNELS], tl.float32)
                for each in range(repeats):
                    head = group * repeats + each
                    of_rows = (batch * H + head).to(tl.int64) * T
                    queries = place(Q, batch, head, q_b, q_h, UNIT)
                    frees = FREE + (batch.to(tl.int64) * T * H + head) * width
                    bias = BIAS + batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
                    for first in range(start, stop, SIDE):
                        row = first - offset + tl.arange(0, SIDE)
                        log_z, some = flagged_log_z(FLAGS + of_rows, LOG_Z + of_rows, row, T)
                        if some:
                            x = scores(
                                queries, keys, bias, SEG_Q, SEG_K, RANK, row + offset, key, T, S, offset, seen, scale,
                                q_t, k_t, bias_t, bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
                            )  # fmt: skip
                            log_p = x - log_z[:, None]
                            r = posterior(
                                log_p, values, frees, betas, key, row, S, T, v_t, H * width, part, width, UNIT
                            )
                            by_mean = load_chunk(TO_MEAN + of_rows * width, row, T, width, part, width, 1)
                            by_total = load_chunk(TO_TOTAL + of_rows * width, row, T, width, part, width, 1)
                            by_value = r * (beta[None, :] * by_total)[:, None, :]
                            dv += tl.sum(tl.exp2(log_p)[:, :, None] * by_mean[:, None, :] + by_value, 0)
                add(
                    TO_V + token[:, None] * width + channel[None, :],
                    dv,
                    (key < S)[:, None] & (channel < width)[None, :],
                )
