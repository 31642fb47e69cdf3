"""Device code of the exact read: rows that were flagged, one key and channel at a time, and their gradients from the
posterior itself:

    r = p exp(beta (v - F)),   dF/dv = r,   dF/dscore = (r - p) / beta,   dF/dbeta = (E_r[v] - F) / beta

F is rounded, so r sums to exp(beta (F - rounded F)): rows are divided by that sum first. The kernels are always
launched, and a program leaves at once where no row is flagged: nothing is asked of the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.softmax.triton_kernels import (
    GATE_STRIDES,
    INF,
    LOG2E,
    SEGMENT_POINTERS,
    STRIDES,
    gated,
    load_columns,
    load_tile,
    place,
)
from femixer.kernels.triton_math import expm1, log1p, rolled

# Rows and keys of a tile, and the channels that are taken at a time: with more of them registers do not suffice.
SIDE, CHANNELS = tl.constexpr(16), tl.constexpr(8)
# Channels of keys and queries whose gradients are summed at a time.
COLUMNS = tl.constexpr(16)
# More than any position: where there is no window.
NO_WINDOW = 1 << 28
FAR_AWAY = tl.constexpr(NO_WINDOW)
# Who sees whom, in numbers: these kernels are launched always and do something almost never, so none of them is
# compiled anew for it. Whether there is a dense bias, decays, causality, segments and ranks of tokens; the window.
SEEN = ["dense", "decays", "causal", "segmented", "ranked", "window"]


@triton.jit
def scores(
    queries, keys, BIAS, SEG_Q, SEG_K, RANK, query, key, T, S, offset, seen, scale, q_t, k_t, bias_t, bias_s, key_width,
    UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, keys] in units of log 2, -inf where a key is not seen."""
    dense, decays, causal, segmented, ranked, window = seen
    x = tl.zeros([SIDE, SIDE], tl.float32)
    for first in range(0, rolled(KEY_WIDTH, T), SIDE):  # some channels at a time, for want of registers
        q = load_tile(queries + first, query - offset, T, q_t, key_width - first, UNIT, SIDE)
        k = load_columns(keys + first, key, S, k_t, key_width - first, UNIT, SIDE)
        x = tl.dot(q, k, x, input_precision=PRECISION)
    x *= scale * LOG2E
    row, there = (query - offset)[:, None], ((query >= offset) & (query < offset + T))[:, None] & (key < S)[None, :]
    at = row.to(tl.int64) * bias_t + key[None, :].to(tl.int64) * bias_s
    x += tl.load(BIAS + at, mask=there & (0 * at + dense > 0), other=0).to(tl.float32) * LOG2E
    for part in tl.static_range(2):
        of_row = tl.load(BIAS + part * S + query, mask=(query >= 0) & (query < S * decays), other=0).to(tl.float32)
        of_key = tl.load(BIAS + part * S + key, mask=key < S * decays, other=0).to(tl.float32)
        x += of_row[:, None] - of_key[None, :]
    hidden = (key[None, :] > query[:, None]) & (0 * key[None, :] + causal > 0)
    segment = tl.load(SEG_Q + row, mask=(row >= 0) & (row < T * segmented), other=0)
    same = segment == tl.load(SEG_K + key, mask=key < S * segmented, other=0)[None, :]
    of_row = query * (1 - ranked) + tl.load(RANK + query, mask=(query >= 0) & (query < S * ranked), other=0)
    of_key = key * (1 - ranked) + tl.load(RANK + key, mask=key < S * ranked, other=0)
    near = tl.abs(of_row[:, None] - of_key[None, :]) < window
    return tl.where(there & (hidden == 0) & same & (segment >= 0) & near, x, -INF)


@triton.jit
def seen_range(first, last, S, causal, segmented, window):
    """Keys that rows at positions first to last may see, from a tile's start. Windows over segments only mask."""
    near = window + segmented * FAR_AWAY
    stop = tl.minimum(S, tl.minimum(last + 1 + (1 - causal) * FAR_AWAY, last + near))
    return tl.maximum(first - near + 1, 0) // SIDE * SIDE, stop


@triton.jit
def load_chunk(base, token, count, stride, first, width, UNIT: tl.constexpr):
    """CHANNELS channels from `first` of tokens, [N, CHANNELS]."""
    channel = first + tl.arange(0, CHANNELS)
    inside = ((token >= 0) & (token < count))[:, None] & (channel < width)[None, :]
    at = token[:, None] * stride * UNIT + channel[None, :]
    return tl.load(base + at, mask=inside, other=0).to(tl.float32)


@triton.jit(
    do_not_specialize=["T", "S", "tiles", "H", "repeats", "offset", *SEEN, *STRIDES, *GATE_STRIDES],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def read_exactly(
    Q, K, V, BETAS, LAMS, GATES, BIAS, SEG_Q, SEG_K, RANK, MEAN, FREE, LOG_Z, FLAGS, OUT,
    T, S, tiles, H, repeats, offset, dense, decays, causal, segmented, ranked, window, scale, eps,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, lam_b, lam_t, lam_h, gate_b, gate_t, gate_h,
    bias_b, bias_h, bias_t, bias_s, seg_q, seg_k,
    GATED: tl.constexpr, LAM: tl.constexpr, GATE: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, key_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """FREE and OUT of flagged rows. First F0 by log-sum-exp over the keys of score + beta v, whose digits are those of
    its largest term; then F = F0 + log(1 + sum p (exp(beta (v - F0)) - 1)) / beta, whose sum is almost zero."""
    program = tl.program_id(0)
    seen = (dense, decays, causal, segmented, ranked, window)
    pair = program // tiles
    row = program % tiles * SIDE + tl.arange(0, SIDE)
    here = row < T
    at_row = pair.to(tl.int64) * T + row
    flagged = tl.load(FLAGS + at_row, mask=here, other=0) > 0
    if tl.max(flagged.to(tl.int32), 0) > 0:
        batch, head = pair // H, pair % H
        group = head // repeats
        SEG_Q += batch.to(tl.int64) * seg_q
        SEG_K += batch.to(tl.int64) * seg_k
        RANK += batch.to(tl.int64) * S
        BIAS += batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
        query = row + offset
        queries = place(Q, batch, head, q_b, q_h, UNIT)
        keys, values = place(K, batch, group, k_b, k_h, UNIT), place(V, batch, group, v_b, v_h, UNIT)
        log_z = tl.load(LOG_Z + at_row, mask=here, other=INF)
        start, stop = seen_range(tl.min(query, 0), tl.max(query, 0), S, causal, segmented, window)
        to_row = (batch.to(tl.int64) * T + row) * H + head
        for first in range(0, rolled(width, T), CHANNELS):
            channel = first + tl.arange(0, CHANNELS)
            inside = flagged[:, None] & (channel < width)[None, :]
            at = to_row[:, None] * width + channel[None, :]
            beta = tl.load(BETAS + group * width + channel, mask=channel < width, other=1).to(tl.float32)
            slope = (beta * LOG2E)[None, :]
            top = tl.full([SIDE, CHANNELS], -INF, tl.float32)
            total = tl.zeros([SIDE, CHANNELS], tl.float32)
            for block in range(start, stop, SIDE):
                key = block + tl.arange(0, SIDE)
                x = scores(
                    queries, keys, BIAS, SEG_Q, SEG_K, RANK, query, key, T, S, offset, seen, scale, q_t, k_t, bias_t,
                    bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
                )  # fmt: skip
                v = load_chunk(values, key, S, v_t, first, width, UNIT)
                y = x[:, :, None] + (slope * v)[None, :, :]
                higher = tl.maximum(top, tl.max(y, 1))
                finite = tl.where(higher == -INF, 0.0, higher)
                total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(y - finite[:, None, :]), 1)
                top = higher
            some = total > 0
            anchor = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)) - log_z[:, None], 0.0) / slope
            rise = tl.zeros([SIDE, CHANNELS], tl.float32)
            lost = tl.zeros([SIDE, CHANNELS], tl.float32)
            for block in range(start, stop, SIDE):
                key = block + tl.arange(0, SIDE)
                x = scores(
                    queries, keys, BIAS, SEG_Q, SEG_K, RANK, query, key, T, S, offset, seen, scale, q_t, k_t, bias_t,
                    bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
                )  # fmt: skip
                v = load_chunk(values, key, S, v_t, first, width, UNIT)
                log_p = (x - log_z[:, None])[:, :, None]
                p = tl.exp2(log_p)
                exponent = slope[None, :, :] * (v[None, :, :] - anchor[:, None, :])
                near = tl.abs(exponent) < 0.5
                term = tl.where(near, p * expm1(tl.where(near, exponent, 0.0) / LOG2E), tl.exp2(log_p + exponent) - p)
                # A compensated sum: what rounding takes from one block's sum is given to the next.
                more = tl.sum(term, 1) - lost
                risen = rise + more
                lost = (risen - rise) - more
                rise = risen
            free = anchor + log1p(tl.maximum(rise, -0.5)) / beta[None, :]
            mean = tl.load(MEAN + at, mask=inside, other=0).to(tl.float32)
            tl.store(FREE + at, tl.maximum(free, mean), mask=inside)
        if GATED:
            tl.debug_barrier()
            channel = tl.arange(0, WIDTH)
            inside = flagged[:, None] & (channel < width)[None, :]
            at = to_row[:, None] * width + channel[None, :]
            mean = tl.load(MEAN + at, mask=inside, other=0).to(tl.float32)
            free = tl.load(FREE + at, mask=inside, other=0).to(tl.float32)
            lam, gate = mean, mean
            if LAM:
                lam = load_tile(place(LAMS, batch, head, lam_b, lam_h, UNIT), row, T, lam_t, width, UNIT, WIDTH)
            if GATE:
                gate = load_tile(place(GATES, batch, head, gate_b, gate_h, UNIT), row, T, gate_t, width, UNIT, WIDTH)
                gate = tl.where((channel < width)[None, :], gate.to(tl.float32), -INF)
            out = gated(mean, free, lam.to(tl.float32), gate, width, eps, True, LAM, GATE)
            tl.store(OUT + at, out, mask=inside)


@triton.jit
def flagged_log_z(FLAGS, LOG_Z, row, T):
    """Log-normalizers of flagged rows, infinite for others, so that their weights are zero; and whether one is."""
    here = (row >= 0) & (row < T)
    flagged = tl.load(FLAGS + row, mask=here, other=0) > 0
    return tl.load(LOG_Z + row, mask=flagged, other=INF), tl.max(flagged.to(tl.int32), 0) > 0


@triton.jit
def add(places, more, inside):
    before = tl.load(places, mask=inside, other=0).to(tl.float32)
    tl.debug_barrier()  # whoever holds a copy has read it before it is written
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
    dp = tl.zeros([SIDE, SIDE], tl.float32)
    for first in range(0, rolled(WIDTH, T), SIDE):
        by_mean = load_tile(to_mean + first, row, T, width, width - first, 1, SIDE)
        v = load_columns(values + first, key, S, v_t, width - first, UNIT, SIDE)
        dp = tl.dot(by_mean, v, dp, input_precision=PRECISION)
    delta = tl.load(deltas + row, mask=(row >= 0) & (row < T), other=0)
    ds = tl.exp2(log_p) * (dp - delta[:, None])
    for first in range(0, rolled(width, T), CHANNELS):
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
        for first in range(0, rolled(width, T), CHANNELS):
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
            tl.debug_barrier()  # whoever holds a copy has read it before it is written
            tl.store(to_total + row.to(tl.int64)[:, None] * width + channel[None, :], by_total, mask=inside)
            beta = tl.load(betas + channel, mask=channel < width, other=1).to(tl.float32)[None, :]
            to_beta = tl.where(inside, by_total * total * (above / total - tl.log(total) / beta), 0.0)
            tl.store(PARTS + part * width + channel, tl.sum(to_beta, 0), mask=channel < width)
        tl.debug_barrier()
        for columns in range(0, rolled(KEY_WIDTH, T), COLUMNS):
            dq = tl.zeros([SIDE, COLUMNS], tl.float32)
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
                k = load_tile(keys + columns, key, S, k_t, key_width - columns, UNIT, COLUMNS)
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
            wide = columns + tl.arange(0, COLUMNS)
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
            token = (batch.to(tl.int64) * S + key) * G + group
            for part in range(0, rolled(KEY_WIDTH, T), COLUMNS):
                dk = tl.zeros([SIDE, COLUMNS], tl.float32)
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
                            x = scores(
                                queries, keys, bias, SEG_Q, SEG_K, RANK, row + offset, key, T, S, offset, seen, scale,
                                q_t, k_t, bias_t, bias_s, key_width, UNIT, KEY_WIDTH, PRECISION,
                            )  # fmt: skip
                            ds = score_gradient(
                                x - log_z[:, None], values, frees, betas, TO_MEAN + of_rows * width,
                                TO_TOTAL + of_rows * width, DELTA + of_rows, key, row, S, T, v_t, H * width, width,
                                UNIT, WIDTH, PRECISION,
                            )  # fmt: skip
                            q = load_tile(queries + part, row, T, q_t, key_width - part, UNIT, COLUMNS)
                            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
                            to_sums -= tl.sum(ds, 0)
                    decaying = key < S * decays * (part == 0)
                    add(TO_SUMS + (batch * H + head).to(tl.int64) * S + key, to_sums, decaying)
                wide = part + tl.arange(0, COLUMNS)
                add(
                    TO_K + token[:, None] * key_width + wide[None, :],
                    dk * scale,
                    (key < S)[:, None] & (wide < key_width)[None, :],
                )
            for part in range(0, rolled(width, T), CHANNELS):
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
