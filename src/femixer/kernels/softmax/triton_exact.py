"""Device code of the exact read: rows that were flagged, one key and channel at a time, and their gradients.

The kernels are always launched, and a program leaves at once where no row is flagged: nothing is asked of the device.
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
from femixer.kernels.triton_math import expm1, log1p

# Rows and keys of a tile, and the channels that are taken at a time: with more of them registers do not suffice.
SIDE, CHANNELS = tl.constexpr(16), tl.constexpr(8)
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
    for first in range(0, KEY_WIDTH, SIDE):  # some channels at a time, for want of registers
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
        for first in range(0, width, CHANNELS):
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
