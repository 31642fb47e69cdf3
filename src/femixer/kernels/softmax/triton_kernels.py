"""Device code of the softmax read: who sees whom, the streams of values, the read by tiles, the exact read of rows.

The read is flash attention on two streams, v and e = exp(beta (v - top)). `top` is the largest value of a channel up to
the key's block (of all keys, if not causal); where it grows from one block to the next, sums so far shrink by a factor
that is known before. A row is flagged if that is not exact enough for it, and read again one key and channel at a time.

Row t of T queries stands at position t + offset among the S keys. Scores are in units of log 2, values in their own.
Tiles of rows are aligned by position. B batch, H heads, G key/value heads, E key width, D value width, J key blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.triton_math import expm1, log1p, softplus

LOG2E = tl.constexpr(1.4426950408889634)
# What is added to scores.
DENSE, DECAYS = tl.constexpr(1), tl.constexpr(2)
INF = tl.constexpr(float("inf"))
# Strides are given as numbers like sizes: nothing is compiled anew for others.
STRIDES = ["q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "v_b", "v_t", "v_h"]
STRIDES += ["bias_b", "bias_h", "bias_t", "bias_s", "seg_q", "seg_k"]
# Where segments begin in memory depends on what they were cut from: none is compiled anew for it.
SEGMENT_POINTERS = ["SEG_Q", "SEG_K"]
GATE_STRIDES = ["lam_b", "lam_t", "lam_h", "gate_b", "gate_t", "gate_h"]
# Rows that share the top to which their gradients are relative.
ROWS = tl.constexpr(128)
# F is exact where it lies at most this many nats below the top.
FAR = tl.constexpr(60.0)
# As in femixer.kernels.streams: widest narrow channel, smallest beta of a wide one, and F that loses digits below top.
NARROW, SMALL_BETA, FAR_BELOW = tl.constexpr(2.0), tl.constexpr(0.1), tl.constexpr(40.0)
# Beyond this beta |F| the rounding of F shows in gradients, unless they are divided by the sum of the posterior.
LARGE = tl.constexpr(1000.0)


@triton.jit
def place(base, batch, head, stride_b, stride_h, UNIT: tl.constexpr):
    """Of a head's first token. Strides are given in units, so that their alignment is known."""
    return base + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h) * UNIT


@triton.jit
def load_tile(base, token, count, stride, width, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens [N] of a head -> [N, WIDTH], zero outside of count tokens and width channels.

    Within a sequence 32 bits are enough: `triton_call.refuse`.
    """
    channel = tl.arange(0, WIDTH)
    inside = ((token >= 0) & (token < count))[:, None] & (channel < width)[None, :]
    return tl.load(base + token[:, None] * stride * UNIT + channel[None, :], mask=inside, other=0)


@triton.jit
def load_columns(base, token, count, stride, width, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """The same transposed, [WIDTH, N]."""
    channel = tl.arange(0, WIDTH)
    inside = ((token >= 0) & (token < count))[None, :] & (channel < width)[:, None]
    return tl.load(base + token[None, :] * stride * UNIT + channel[:, None], mask=inside, other=0)


@triton.jit
def load_block(base, first, count, stride, width, UNIT: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """N tokens from `first` of a head -> [N, WIDTH], addressed from the first by small numbers."""
    token, channel = tl.arange(0, N), tl.arange(0, WIDTH)
    inside = ((token >= -first) & (token < count - first))[:, None] & (channel < width)[None, :]
    start = base + tl.cast(first, tl.int64) * stride * UNIT
    return tl.load(start + (token[:, None] * stride * UNIT + channel[None, :]), mask=inside, other=0)


@triton.jit
def load_block_columns(base, first, count, stride, width, UNIT: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """The same transposed, [WIDTH, N]."""
    token, channel = tl.arange(0, N), tl.arange(0, WIDTH)
    inside = ((token >= -first) & (token < count - first))[None, :] & (channel < width)[:, None]
    start = base + tl.cast(first, tl.int64) * stride * UNIT
    return tl.load(start + (token[None, :] * stride * UNIT + channel[:, None]), mask=inside, other=0)


@triton.jit
def load_numbers(base, first, count, other, N: tl.constexpr):
    """One number each of N tokens from `first`."""
    token = tl.arange(0, N)
    return tl.load(base + first + token, mask=(token >= -first) & (token < count - first), other=other)


@triton.jit
def visible(
    query, key, SEG_Q, SEG_K, RANK, offset, T, S, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Which keys queries at some positions see; query [M, 1] and key [1, N], or the other way round.

    SEG_Q, SEG_K, RANK point to segments and counts of real tokens of this sequence.
    """
    seen = (key < S) & (query >= offset) & (query - offset < T)
    if CAUSAL:
        seen = seen & (key <= query)
    if SEGMENTS:
        of_query = tl.load(SEG_Q + (query - offset), mask=(query >= offset) & (query - offset < T), other=-1)
        of_key = tl.load(SEG_K + key, mask=key < S, other=-1)
        seen = seen & (of_query == of_key) & (of_query >= 0)
    if WINDOW:
        if SEGMENTS:
            rank_query = tl.load(RANK + query, mask=(query >= 0) & (query < S), other=0)
            rank_key = tl.load(RANK + key, mask=key < S, other=0)
            seen = seen & (tl.abs(rank_query - rank_key) < window)
        else:
            seen = seen & (tl.abs(query - key) < window)
    return seen


@triton.jit
def load_bias(BIAS, query, key, offset, T, S, stride_t, stride_s, KIND: tl.constexpr):
    """In units of log 2, for positions of queries and keys as in `visible`: of KIND DENSE [T, S], or DECAYS, of which
    BIAS has the sums up to every token in two parts [2, S]. The difference of the first parts is exact where it is
    small, so it has its digits however long the sequence."""
    if KIND == DENSE:
        row = (query - offset).to(tl.int64)
        inside = (row >= 0) & (row < T) & (key < S)
        at = row * stride_t + key.to(tl.int64) * stride_s
        bias = tl.load(BIAS + at, mask=inside, other=0).to(tl.float32) * LOG2E
    else:
        there = (query >= 0) & (query < S)
        first = tl.load(BIAS + query, mask=there, other=0) - tl.load(BIAS + key, mask=key < S, other=0)
        bias = first + (tl.load(BIAS + S + query, mask=there, other=0) - tl.load(BIAS + S + key, mask=key < S, other=0))
    return bias


@triton.jit(do_not_specialize=["count", "S"])
def split_sums(SUMS, PARTS, count, S, BLOCK: tl.constexpr):
    """PARTS [heads, 2, S]: the later S of the sums of log decays SUMS [heads, 2 S], in units of log 2 and two parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head, key = at // S, at % S
    x = tl.load(SUMS + head * 2 * S + S + key, mask=at < count, other=0).to(tl.float64) * LOG2E
    first = x.to(tl.float32)
    tl.store(PARTS + head * 2 * S + key, first, mask=at < count)
    tl.store(PARTS + head * 2 * S + S + key, (x - first.to(tl.float64)).to(tl.float32), mask=at < count)


@triton.jit
def gated(mu, free, lam, gate, width, eps, BETA: tl.constexpr, LAM: tl.constexpr, GATE: tl.constexpr):
    """g ((1 - lam) mu + lam F) of rows [M, D]; logits are -inf outside of the channels."""
    read = mu
    if BETA:
        read = mu + tl.sigmoid(lam) * (free - mu) if LAM else free
    if GATE:
        positive = softplus(gate)
        read = read * positive * tl.rsqrt(tl.sum(positive * positive, 1) / width + eps)[:, None]
    return read


@triton.jit
def is_real(segments, key, S, segmented):
    """Which keys there are, apart from padding; segmented: whether there are segments, 0 or 1."""
    return (key < S) & (tl.load(segments + key, mask=key < S * segmented, other=0) >= 0)


@triton.jit(
    do_not_specialize=["S", "J", "chunks", "G", "sb", "st", "sh", "seg_b", "segmented"],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def block_ranges(
    V, SEG_K, LOCAL, HIGHEST, LOWEST, S, J, chunks, G, sb, st, sh, seg_b, segmented,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """LOCAL [B, G, J, D]: largest value from the start of its chunk of BLOCKS blocks up to a block; HIGHEST, LOWEST
    [B, G, chunks, D]: of the chunk. -inf and inf if all is padding."""
    program = tl.program_id(0)
    pair, chunk = program // chunks, program % chunks
    batch, group = pair // G, pair % G
    values = place(V, batch, group, sb, sh, UNIT)
    channel = tl.arange(0, WIDTH)
    top = tl.full([WIDTH], -INF, tl.float32)
    bottom = tl.full([WIDTH], INF, tl.float32)
    for block in range(chunk * BLOCKS, min(chunk * BLOCKS + BLOCKS, J)):
        key = block * KEYS + tl.arange(0, KEYS)
        v = load_tile(values, key, S, st, width, UNIT, WIDTH).to(tl.float32)
        real = is_real(SEG_K + batch.to(tl.int64) * seg_b, key, S, segmented)
        top = tl.maximum(top, tl.max(tl.where(real[:, None], v, -INF), 0))
        bottom = tl.minimum(bottom, tl.min(tl.where(real[:, None], v, INF), 0))
        tl.store(LOCAL + (pair.to(tl.int64) * J + block) * width + channel, top, mask=channel < width)
    at = program.to(tl.int64) * width + channel
    tl.store(HIGHEST + at, top, mask=channel < width)
    tl.store(LOWEST + at, bottom, mask=channel < width)


@triton.jit(
    do_not_specialize=["S", "J", "chunks", "G", "sb", "st", "sh", "seg_b", "segmented"],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def streams(
    V, SEG_K, BETA, LOCAL, HIGHEST, LOWEST, EXPS, TOPS, SHRINK, S, J, chunks, G, sb, st, sh, seg_b,
    segmented, UNIT: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr,
    CAUSAL: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """EXPS [B, G, S, D]: exp(beta (v - top)), less one in narrow channels; TOPS [B, G, J + 1, D]: the top of a block,
    and last whether a channel is narrow; SHRINK [B, G, J, D]: the factor of earlier sums."""
    program = tl.program_id(0)
    pair, block = program // J, program % J
    batch, group = pair // G, pair % G
    chunk = block // BLOCKS
    channel = tl.arange(0, WIDTH)
    inside = channel < width
    before = tl.full([WIDTH], -INF, tl.float32)
    whole, bottom = before, tl.full([WIDTH], INF, tl.float32)
    for start in range(0, chunks, 16):
        each = start + tl.arange(0, 16)
        at = (pair.to(tl.int64) * chunks + each)[:, None] * width + channel[None, :]
        here = (each < chunks)[:, None] & inside[None, :]
        high = tl.load(HIGHEST + at, mask=here, other=-INF)
        low = tl.load(LOWEST + at, mask=here, other=INF)
        whole, bottom = tl.maximum(whole, tl.max(high, 0)), tl.minimum(bottom, tl.min(low, 0))
        before = tl.maximum(before, tl.max(tl.where((each < chunk)[:, None], high, -INF), 0))
    local = LOCAL + (pair.to(tl.int64) * J + block) * width + channel
    first = block % BLOCKS == 0
    previous = tl.maximum(before, tl.load(local - width, mask=inside & (not first), other=-INF))
    top = tl.maximum(previous, tl.load(local, mask=inside, other=-INF))
    beta = tl.load(BETA + group * width + channel, mask=inside, other=1).to(tl.float32)
    some = whole >= bottom
    narrow = beta * (tl.where(some, whole, 0.0) - tl.where(some, bottom, 0.0)) <= NARROW
    top = tl.where(narrow, whole, top) if CAUSAL else whole
    known = top > -INF
    top = tl.where(known, top, 0.0)
    grown = CAUSAL & (narrow == 0) & (previous > -INF)
    shrink = tl.where(grown, tl.exp2(beta * LOG2E * (tl.where(grown, previous, top) - top)), 1.0)
    key = block * KEYS + tl.arange(0, KEYS)
    v = load_tile(place(V, batch, group, sb, sh, UNIT), key, S, st, width, UNIT, WIDTH).to(tl.float32)
    exponent = beta[None, :] * tl.minimum(v - top[None, :], 0.0)
    e = tl.where(narrow[None, :], expm1(tl.maximum(exponent, -4 * NARROW)), tl.exp2(exponent * LOG2E))
    real = is_real(SEG_K + batch.to(tl.int64) * seg_b, key, S, segmented)
    e = tl.where(real[:, None], e, 0.0)
    at = (pair.to(tl.int64) * S + key)[:, None] * width + channel[None, :]
    tl.store(EXPS + at, e.to(EXPS.dtype.element_ty), mask=(key < S)[:, None] & inside[None, :])
    tl.store(SHRINK + (pair.to(tl.int64) * J + block) * width + channel, shrink, mask=inside)
    tops = TOPS + pair.to(tl.int64) * (J + 1) * width + channel
    tl.store(tops + block * width, top, mask=inside)
    if block == 0:
        tl.store(tops + J * width, narrow.to(tl.float32), mask=inside)


@triton.jit
def attend(
    q, keys, values, exps, shrinks, BIAS, SEG_Q, SEG_K, RANK, m, weight, mean, total, query, start, stop,
    T, S, offset, window, scale, k_t, v_t, bias_t, bias_s, key_width, width,
    MASKED: tl.constexpr, BETA: tl.constexpr, HAS_BIAS: tl.constexpr, SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, UNIT: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop join the running maximum m and sums weight [M] of weights, mean and total [M, D] of
    weighted values and exponentials."""
    channel = tl.arange(0, WIDTH)
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        k = load_block_columns(keys, first, S, k_t, key_width, UNIT, KEYS, KEY_WIDTH)
        x = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_BIAS:
            x += load_bias(BIAS, query[:, None], key[None, :], offset, T, S, bias_t, bias_s, HAS_BIAS)
        if MASKED:
            seen = visible(
                query[:, None], key[None, :], SEG_Q, SEG_K, RANK, offset, T, S, window, CAUSAL, WINDOW, SEGMENTS
            )
            x = tl.where(seen, x, -INF)
        higher = tl.maximum(m, tl.max(x, 1))
        finite = tl.where(higher == -INF, 0.0, higher)
        p = tl.exp2(x - finite[:, None])
        kept = tl.exp2(m - finite)
        m = higher
        weight = weight * kept + tl.sum(p, 1)
        v = load_block(values, first, S, v_t, width, UNIT, KEYS, WIDTH)
        mean = tl.dot(p.to(v.dtype), v, mean * kept[:, None], input_precision=PRECISION)
        if BETA:
            e = load_block(exps, first, S, width, width, 1, KEYS, WIDTH)
            shrink = tl.load(shrinks + (first // KEYS) * width + channel, mask=channel < width, other=1)
            total = tl.dot(p.to(e.dtype), e, total * (kept[:, None] * shrink[None, :]), input_precision=PRECISION)
    return m, weight, mean, total


@triton.jit
def key_range(
    first, last, S, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Keys that rows at positions first to last may see, from a block's start."""
    start, stop = first * 0, S
    if CAUSAL:
        stop = tl.minimum(last + 1, S)
    if WINDOW and not SEGMENTS:
        start = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        stop = tl.minimum(stop, last + window)
    return start, stop


@triton.jit
def is_doubtful(free, top, beta, narrow, EXACT: tl.constexpr):
    """Where F from the streams is not good enough: too far below the top, and for float32 channels that are cold and
    wide, or far from zero."""
    doubtful = (beta * (top - free) > FAR) | (free == -INF)
    if EXACT:
        doubtful = doubtful | ((beta < SMALL_BETA) & (narrow == 0))
        doubtful = doubtful | (beta * tl.abs(free) > LARGE)
        doubtful = doubtful | ((top - free > FAR_BELOW * tl.maximum(tl.abs(free), 1.0)) & (narrow == 0))
    return doubtful


@triton.jit(
    do_not_specialize=["T", "S", "J", "tiles", "H", "repeats", "offset", "window", *STRIDES, *GATE_STRIDES],
    do_not_specialize_on_alignment=SEGMENT_POINTERS,
)
def read(
    Q, K, V, BETAS, LAMS, GATES, BIAS, SEG_Q, SEG_K, RANK, EXPS, TOPS, SHRINK, MEAN, FREE, LOG_Z, FLAGS, OUT,
    T, S, J, tiles, H, repeats, offset, window, scale, eps,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, lam_b, lam_t, lam_h, gate_b, gate_t, gate_h,
    bias_b, bias_h, bias_t, bias_s, seg_q, seg_k,
    BETA: tl.constexpr, GATED: tl.constexpr, LAM: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr, UNIT: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    key_width: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """MEAN, FREE, OUT [B, T, H, D], LOG_Z [B, H, T] in units of log 2 (inf where nothing is seen), FLAGS [B, H, T]."""
    program = tl.program_id(0)
    # Under causality late tiles have the most keys: they begin.
    tile = offset // TILE + tiles - 1 - program % tiles
    pair = program // tiles
    batch, head = pair // H, pair % H
    group = head // repeats
    G = H // repeats
    of_keys = (batch * G + group).to(tl.int64)
    SEG_Q += batch.to(tl.int64) * seg_q
    SEG_K += batch.to(tl.int64) * seg_k
    RANK += batch.to(tl.int64) * S
    BIAS += batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
    query = tile * TILE + tl.arange(0, TILE)
    row = query - offset
    q = load_tile(place(Q, batch, head, q_b, q_h, UNIT), row, T, q_t, key_width, UNIT, KEY_WIDTH)
    keys, values = place(K, batch, group, k_b, k_h, UNIT), place(V, batch, group, v_b, v_h, UNIT)
    exps, shrinks = EXPS + of_keys * S * width, SHRINK + of_keys * J * width
    m = tl.full([TILE], -INF, tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    mean = tl.zeros([TILE, WIDTH], tl.float32)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    start, stop = key_range(tile * TILE, tile * TILE + TILE - 1, S, offset, window, CAUSAL, WINDOW, SEGMENTS, KEYS)
    scores = scale * LOG2E
    middle = start
    if not WINDOW and not SEGMENTS:
        middle = tl.minimum(tile * TILE, S) // KEYS * KEYS if CAUSAL else S // KEYS * KEYS
        m, weight, mean, total = attend(
            q, keys, values, exps, shrinks, BIAS, SEG_Q, SEG_K, RANK, m, weight, mean, total, query, start, middle,
            T, S, offset, window, scores, k_t, v_t, bias_t, bias_s, key_width, width,
            False, BETA, HAS_BIAS, SEGMENTS, CAUSAL, WINDOW, UNIT, KEY_WIDTH, WIDTH, KEYS, PRECISION,
        )  # fmt: skip
    m, weight, mean, total = attend(
        q, keys, values, exps, shrinks, BIAS, SEG_Q, SEG_K, RANK, m, weight, mean, total, query, middle, stop,
        T, S, offset, window, scores, k_t, v_t, bias_t, bias_s, key_width, width,
        True, BETA, HAS_BIAS, SEGMENTS, CAUSAL, WINDOW, UNIT, KEY_WIDTH, WIDTH, KEYS, PRECISION,
    )  # fmt: skip
    some = weight > 0
    share = 1 / tl.where(some, weight, 1.0)
    mean = mean * share[:, None]
    at_row = pair.to(tl.int64) * T + row
    here = (row >= 0) & (row < T)
    tl.store(LOG_Z + at_row, tl.where(some, m + tl.log2(tl.where(some, weight, 1.0)), INF), mask=here)
    channel = tl.arange(0, WIDTH)
    inside = here[:, None] & (channel < width)[None, :]
    at = ((batch.to(tl.int64) * T + row) * H + head)[:, None] * width + channel[None, :]
    free = mean
    if BETA:
        beta = tl.load(BETAS + group * width + channel, mask=channel < width, other=1).to(tl.float32)[None, :]
        tops = TOPS + of_keys * (J + 1) * width + channel
        last = tl.minimum((tl.maximum(stop, 1) - 1) // KEYS, J - 1)
        top = tl.load(tops + last * width, mask=channel < width, other=0)[None, :]
        narrow = tl.load(tops + J * width, mask=channel < width, other=0)[None, :]
        total = total * share[:, None]
        positive = total + narrow > 0
        total = tl.where(positive, total, 1.0)
        logarithm = tl.where(
            narrow > 0, log1p(tl.where(narrow > 0, total, 0.0)), tl.log(tl.where(narrow > 0, 1.0, total))
        )
        free = tl.where(positive, top + logarithm / beta, -INF)
        shared = tl.minimum(((tile * TILE) // ROWS * ROWS + ROWS - 1) // KEYS, J - 1)
        highest = tl.load(tops + shared * width, mask=channel < width, other=0)[None, :]
        doubtful = is_doubtful(free, highest, beta, narrow, EXACT) & some[:, None] & (channel < width)[None, :]
        tl.store(FLAGS + at_row, tl.max(doubtful.to(tl.int32), 1).to(tl.int8), mask=here)
        free = tl.maximum(tl.where(some[:, None], free, 0.0), mean)
        tl.store(FREE + at, free, mask=inside)
    tl.store(MEAN + at, mean, mask=inside)
    if GATED:
        lam, gate = mean, mean
        if LAM:
            lam = load_tile(place(LAMS, batch, head, lam_b, lam_h, UNIT), row, T, lam_t, width, UNIT, WIDTH)
        if GATE:
            gate = load_tile(place(GATES, batch, head, gate_b, gate_h, UNIT), row, T, gate_t, width, UNIT, WIDTH)
            gate = tl.where((channel < width)[None, :], gate.to(tl.float32), -INF)
        out = gated(mean, free, lam.to(tl.float32), gate, width, eps, BETA, LAM, GATE)
        tl.store(OUT + at, out, mask=inside)
