"""What the Triton kernels of decayed linear attention share: a chunk's tokens, gates, scores, and how sums are put
together.

A program has the C tokens of a chunk. Sums are kept as a log weight, a mean and a log mean exponential, never as sums:
these are of the values' size whatever the decays, so that float32 is enough. NOTHING is the logarithm of zero.

Gates are summed within the chunk in two parts: multiples of 1/8, whose sums are exact, and the rest, which stays small.
So the difference of two sums has its digits also where strong gates come before weak ones. Sums are [C, W] with a
column W = 1 for gates per head and none, and W = E for gates per key channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from femixer.kernels.triton_math import expm1, log1p, rolled

NOTHING = tl.constexpr(-1e30)
# A log weight below this is of nothing.
BARELY = tl.constexpr(-1e29)
# A log decay below this leaves nothing of exponents up to 1e4; sums of 64 multiples of 1/8 down to it are exact.
STRONGEST = tl.constexpr(-30000.0)
# Where a sum relative to its largest exponential is below exp(-30), terms are lost or digits of the logarithm.
FAINT = tl.constexpr(1e-13)
# A channel that spans less than this many nats is read as 1 + sum p (exp - 1): the rounding of p then cancels.
NARROW = tl.constexpr(0.5)
# Tokens whose channel-wise decays are taken pair by pair; between such blocks decays go through the end of one.
BLOCK = tl.constexpr(16)
# Key channels at a time: a matrix product holds all of its second factor in registers.
KEYS = tl.constexpr(16)
# The largest exponent that is taken.
MOST = tl.constexpr(80.0)
# Given as numbers: nothing is compiled anew for other lengths or counts of heads, with marks or without, with one gate
# per head or none, for the past alone (exclusive), or for what an encoder asks in addition (by_log).
NUMBERS = ["length", "stretches", "steps", "H", "G", "gated", "marked", "exclusive", "by_log"]
NUMBERS += ["q_b", "k_b", "v_b", "g_b", "g_t", "g_h"]


@triton.jit
def log_of(x):
    """log(x) of x >= 0, NOTHING of zero; NaN stays."""
    return tl.where(x <= 0, NOTHING, tl.log(tl.where(x <= 0, 1.0, x)))


@triton.jit
def exp_of(x):
    """exp(x), bounded: what is larger belongs to tokens that nobody sees."""
    return tl.exp(tl.minimum(x, MOST))


@triton.jit
def add_logs(a, b):
    """log(exp(a) + exp(b)) of finite numbers."""
    top = tl.maximum(a, b)
    return top + tl.log(1 + tl.exp(tl.minimum(a, b) - top))


@triton.jit
def mix(a, log_a, b, log_b):
    """log(exp(a + log_a) + exp(b + log_b)) where the shares exp(log_a) + exp(log_b) are one in all."""
    rise = b - a
    near = tl.abs(rise) < 0.25
    close = a + log1p(tl.exp(log_b) * expm1(tl.where(near, rise, 0.0)))
    return tl.where(near & (log_a > BARELY) & (log_b > BARELY), close, add_logs(a + log_a, b + log_b))


@triton.jit
def chunk_marks(MARKS, b, c, length, marked, C: tl.constexpr):
    """Places t of the chunk's tokens [C], whether they are tokens and no padding, and how many segments have started
    since the chunk's beginning."""
    t = c * C + tl.arange(0, C)
    real = t < length
    marks = tl.load(MARKS + b * length + t, mask=t < length * marked, other=0).to(tl.int32)
    return t, real & ((marks & 1) == 0), tl.cumsum((marks >> 1) & 1, 0)


@triton.jit
def load_rows(X, start, step, real, width: tl.constexpr, WIDTH: tl.constexpr, first=0):
    """[C, WIDTH] in float32: channels from `first` on of the rows from `start` on; zeros for what is not there."""
    column = first + tl.arange(0, WIDTH)
    place = tl.arange(0, real.shape[0])[:, None] * step + column[None, :]
    X += tl.cast(start, tl.int64) * step
    return tl.load(X + place, mask=real[:, None] & (column < width)[None, :], other=0).to(tl.float32)


@triton.jit
def store_rows(X, start, step, inside, x, width: tl.constexpr, WIDTH: tl.constexpr, first=0):
    column = first + tl.arange(0, WIDTH)
    place = tl.arange(0, inside.shape[0])[:, None] * step + column[None, :]
    X += tl.cast(start, tl.int64) * step
    tl.store(X + place, x, mask=inside[:, None] & (column < width)[None, :])


@triton.jit
def row_of(x, i):
    """x[i] of x [rows, columns]."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == i)[:, None], x, 0.0), 0)


@triton.jit
def column_of(x, i):
    """x[:, i] of x [rows, columns]."""
    return tl.sum(tl.where((tl.arange(0, x.shape[1]) == i)[None, :], x, 0.0), 1)


@triton.jit
def chunk_gates(GATE, start, step, real, gated, width: tl.constexpr, C: tl.constexpr, W: tl.constexpr, first=0):
    """Sums of the gates since the chunk's beginning, coarse and fine [C, W], and the same at its end [W]."""
    there = real & (tl.arange(0, C) < C * gated)
    gate = tl.maximum(load_rows(GATE, start, step, there, width, W, first), STRONGEST)
    coarse = tl.floor(gate * 8 + 0.5) * 0.125
    rest = tl.cumsum(gate - coarse, 0)
    return tl.cumsum(coarse, 0), rest, tl.sum(coarse, 0), row_of(rest, C - 1)


@triton.jit
def visibility(real, segment, exclusive, C: tl.constexpr):
    """Which tokens i are seen by t, [C, C]."""
    place = tl.arange(0, C)
    seen = place[:, None] >= place[None, :] + exclusive
    return seen & (segment[:, None] == segment[None, :]) & real[:, None] & real[None, :]


@triton.jit
def in_blocks(x):
    """[C, W] -> [C / BLOCK, BLOCK, W]"""
    return tl.reshape(x, (x.shape[0] // BLOCK, BLOCK, x.shape[1]))


@triton.jit
def of_block(x, i):
    """Row i of every block of x [blocks, BLOCK, W], [blocks, 1, W]."""
    place = tl.arange(0, BLOCK)[None, :, None]
    return tl.sum(tl.where(place == i, x, 0.0), 1)[:, None, :]


@triton.jit
def to_block_end(reach, rest):
    """Log decays from tokens to the end of their block, [C, W]."""
    far, near = in_blocks(reach), in_blocks(rest)
    until = (of_block(far, BLOCK - 1) - far) + (of_block(near, BLOCK - 1) - near)
    return tl.reshape(until, (reach.shape[0], reach.shape[1]))


@triton.jit
def since_block_end(reach, rest, j: tl.constexpr):
    """Log decays from the end of block j to the tokens after it, [C, W]; zero before."""
    end = BLOCK * j + BLOCK - 1
    since = (reach - row_of(reach, end)[None, :]) + (rest - row_of(rest, end)[None, :])
    return tl.minimum(since, 0.0)


@triton.jit
def between(reach, rest):
    """Log decays [C, C] from token i to t for one gate per head."""
    return (reach - tl.trans(reach)) + (rest - tl.trans(rest))


@triton.jit
def chunk_scores(
    Q, K, GATE, start, length, q_t, k_t, g_t, real, reach, rest, seen, E: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s_t(i) [C, C] of what is seen."""
    scores = tl.zeros([C, C], tl.float32)
    for first in tl.range(0, rolled(E, length), KEYS, disable_licm=True):
        q = load_rows(Q, start, q_t, real, E, KEYS, first)
        k = load_rows(K, start, k_t, real, E, KEYS, first)
        if W == 1:
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
        else:
            far, near, whole, remainder = chunk_gates(GATE, start, g_t, real, 1, E, C, KEYS, first)
            scores += _channel_scores(q, k, far, near, C, PRECISION)
    if W == 1:
        scores *= tl.exp(tl.where(seen, between(reach, rest), 0.0))
    return tl.where(seen, scores, 0.0)


@triton.jit
def _channel_scores(q, k, reach, rest, C: tl.constexpr, PRECISION: tl.constexpr):
    """For gates per channel: pair by pair in a block, through the end of the token's block between blocks."""
    scores = tl.zeros([C, C], tl.float32)
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    if C > BLOCK:
        keys = tl.trans(k * tl.exp(to_block_end(reach, rest)))
        for j in tl.static_range(C // BLOCK - 1):
            later = tl.dot(q * tl.exp(since_block_end(reach, rest, j)), keys, input_precision=PRECISION)
            scores += tl.where((column // BLOCK == j) & (row // BLOCK > j), later, 0.0)
    q3, k3, far, near = in_blocks(q), in_blocks(k), in_blocks(reach), in_blocks(rest)
    for i in range(BLOCK):
        decay = tl.exp(tl.minimum((far - of_block(far, i)) + (near - of_block(near, i)), 0.0))
        own = tl.reshape(tl.sum(q3 * of_block(k3, i) * decay, 2), (C,))
        scores += tl.where(column == row // BLOCK * BLOCK + i, own[:, None], 0.0)
    return scores


@triton.jit
def slice_gates(GATE, start, step, real, reach, rest, first, E: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Sums of the gates for KEYS key channels from `first` on, those given if a head has one; the lowest of them."""
    if W == 1:
        coarse, fine, lowest = reach, rest, tl.sum(reach) * 0
    else:
        coarse, fine, whole, remainder = chunk_gates(GATE, start, step, real, 1, E, C, KEYS, first)
        lowest = tl.min(whole)
    return coarse, fine, lowest


@triton.jit
def state_levels(LN, reach, rest, first, E: tl.constexpr):
    """Log weights [C, KEYS] of rows of the state, decayed up to the tokens."""
    row = first + tl.arange(0, KEYS)
    ln = tl.load(LN + row, mask=row < E, other=NOTHING)
    return tl.where((ln > BARELY)[None, :], ln[None, :] + (reach + rest), NOTHING)


@triton.jit
def exponentials(z, real):
    """exp(z - top) - base of z [N, D], top [D] the largest exponent of a channel, base [D] whether it is narrow."""
    top = tl.max(tl.where(real[:, None], z, NOTHING), 0)
    bottom = tl.min(tl.where(real[:, None], z, -NOTHING), 0)
    base = top - bottom < NARROW
    top = tl.where(top > BARELY, top, 0.0)
    below = tl.where(real[:, None], z - top[None, :], 0.0)
    return tl.where(real[:, None], tl.where(base[None, :], expm1(below), tl.exp(below)), 0.0), top, base


@triton.jit
def exponents(z, real):
    """exp(z - top) of z [N, D], and top [D]."""
    top = tl.max(tl.where(real[:, None], z, NOTHING), 0)
    top = tl.where(top > BARELY, top, 0.0)
    return tl.where(real[:, None], tl.exp(tl.minimum(z - top[None, :], 0.0)), 0.0), top


@triton.jit
def log_ratio(ratio, base):
    """log(ratio + base), and where that is doubtful."""
    faint = (ratio < FAINT) & (base == 0)[None, :]
    wide = tl.log(tl.where(faint | base[None, :], 1.0, ratio))
    return tl.where(base[None, :], log1p(tl.where(base[None, :], ratio, 0.0)), wide), faint
