"""Decayed linear attention by matrix products, chunk by chunk: the fast read where a head has one gate or none.

    weight of token i at t:  <q_t, k_i> exp(gate_{i+1} + ... + gate_t),   q, k >= 0, gate <= 0

The streams v and exp(beta (v - top)) lie side by side, with one shift `top` per channel and sequence. As in the softmax
read the sums themselves show where that shift leaves too little; heads concerned are read again by `fast_weights`,
which is exact at any range. Decays are differences of sums within a chunk: nothing is divided by a product of decays.

Axes: B batch, T tokens, H heads, G key/value heads, E key width, D value width; N chunks of C tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels import fast_weights
from femixer.kernels.backend import array, compiled, memory, native
from femixer.kernels.fast_weights import FastWeights
from femixer.kernels.reading import Reading
from femixer.kernels.streams import (
    FAR_BELOW,
    NARROW,
    SMALL_BETA,
    Range,
    Shift,
    exp_minus,
    least_log,
    logarithm,
    value_range,
    value_streams,
)
from femixer.layout import PADDING, START

CHUNK = 64
# A log decay that leaves nothing, and yet can be summed without losing the digits of others.
WIPE = -1000.0
# Sums of gates below this are subtracted in float64.
STRONG = -40.0


class Chunks(NamedTuple):
    """Everything per head and chunk, [B, H, N, C, ...]: features, streams, and within the chunk the decay from token i
    to token t (decay [.., C, C]), from its beginning to t (into [.., C]) and from i to its end (out [.., C]); numbers
    of the segments within the chunk, where there are several."""

    q: Tensor
    k: Tensor
    x: Tensor
    decay: Tensor | None
    into: Tensor | None
    out: Tensor | None
    seen: Tensor
    segment: Tensor | None

    @property
    def whole(self) -> Tensor | None:
        """Decay over a whole chunk [B, H, N]."""
        return None if self.into is None else self.into[..., -1]

    def scores(self) -> Tensor:
        s = self.q @ self.k.mT
        s *= self.seen if self.decay is None else self.decay
        return s


def _chunks(x: Tensor, heads: int, length: int) -> Tensor:
    """[B, T, G, W] -> [B, H, N, C, W], padded with zeros, key/value heads repeated."""
    if length > x.shape[1]:
        x = F.pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))
    x = x.transpose(1, 2)
    if x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    chunk = min(CHUNK, length)
    return x.unflatten(2, (-1, chunk)).contiguous()


def _whole_chunks(length: int) -> int:
    return length if length <= CHUNK else -(-length // CHUNK) * CHUNK


def arrange(q: Tensor, k: Tensor, gate: Tensor | None, x: Tensor, exclusive: bool) -> Chunks:
    heads, length = q.shape[2], _whole_chunks(q.shape[1])
    qc, kc, xc = (_chunks(each, heads, length) for each in (q, k, x))
    chunk = qc.shape[3]
    seen = torch.ones(chunk, chunk, dtype=q.dtype, device=q.device).tril(-1 if exclusive else 0)
    if gate is None:
        return Chunks(qc, kc, xc, None, None, None, seen, None)
    gates = _chunks(gate[..., None].double(), heads, length)[..., 0]
    starts = gates <= WIPE
    segment = starts.cumsum(-1) if bool(starts.any()) else None
    reach = gates.cumsum(-1)
    # Sums of strong gates leave no digits for weak ones in float32.
    digits = reach if bool(reach.amin() < STRONG) else reach.to(q.dtype)
    decay = (digits[..., None] - digits[..., None, :]).to(q.dtype).clamp_(max=0).exp_().mul_(seen)
    into = reach.to(q.dtype).exp()
    out = (reach[..., -1:] - reach).to(q.dtype).exp()
    return Chunks(qc, kc, xc, decay, into, out, seen, segment)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor[..., None]


def states(c: Chunks) -> tuple[Tensor, Tensor]:
    """Before every chunk: the sums of k x [B, H, N, E, W] and of k [B, H, N, E]."""
    keys = _scaled(c.k, c.out)
    sums, totals = keys.mT @ c.x, keys.sum(-2)
    _accumulate(sums, totals, c.whole)
    return sums, totals


def _accumulate(sums: Tensor, totals: Tensor, whole: Tensor | None, backwards: bool = False) -> None:
    """Replace what each chunk adds by what came before it."""
    chunks = range(sums.shape[2])
    state, total = torch.zeros_like(sums[:, :, 0]), torch.zeros_like(totals[:, :, 0])
    for n in reversed(chunks) if backwards else chunks:
        added, added_total = sums[:, :, n].clone(), totals[:, :, n].clone()
        sums[:, :, n], totals[:, :, n] = state, total
        if whole is None:
            state, total = added + state, added_total + total
        else:
            factor = whole[:, :, n, None]
            state, total = added.addcmul_(factor[..., None], state), added_total.addcmul_(factor, total)


def _flat(x: Tensor, length: int) -> Tensor:
    """[B, H, N, C, W] -> [B, T, H, W]"""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


def chunked_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mean and free energy [B, T, H, D] and log total [B, T, H] of whole sequences (no state before them).

    q [B, T, H, E], k [B, T, G, E] nonnegative; gate [B, T, G]; v [B, T, G, D]; beta [G, D]; marks [B, T].
    """
    if marks is not None:
        padding, start = (marks == PADDING)[..., None], (marks == START)[..., None]
        k, v = k.masked_fill(padding[..., None], 0), v.masked_fill(padding[..., None], 0)
        if gate is None:
            gate = k.new_zeros(k.shape[:3])
        gate = gate.masked_fill(padding, 0).masked_fill(start, WIPE)
    if not compiled(v):
        return _plain(q, k, gate, v, beta, marks, exclusive)
    mean, free, log_total, _ = _read(q, k, gate, v, beta, marks, exclusive)
    return mean, None if beta is None else free, log_total


def _exactly(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    exclusive: bool,
) -> Reading:
    gate = None if gate is None else gate[..., None]
    return fast_weights.fast_weight_read(q, k, gate, v, beta, marks, FastWeights.empty(k, v, beta), exclusive)


def _plain(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Without compiled kernels: the same operator where its sums suffice, else all heads exactly. A compiled graph
    cannot look at the sums and takes the exact way at once."""
    if not torch.compiler.is_compiling():
        mean, free, log_total, exact = _read(q, k, gate, v, beta, marks, exclusive)
        if not bool(exact.any()):
            return mean, None if beta is None else free, log_total
    read = _exactly(q, k, gate, v, beta, marks, exclusive)
    return read.mean, read.free, read.log_total


def _padding(marks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where there is padding, and the runs that `value_range` asks for."""
    if marks is None:
        return None, None
    padding = marks == PADDING
    return padding, torch.where(padding, -1, 0)


@torch.library.custom_op("femixer::chunked_read", mutates_args=())
def _read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> (mean, free, log total, heads [B, H] that are not good enough, or were read again where that is possible)."""
    repeats = q.shape[2] // v.shape[2]
    padding, run = _padding(marks)
    span = shift = None
    if beta is not None:
        span, shift = value_range(v, beta, run)
    if not compiled(v):
        return _by_products(q, k, gate, v, beta, padding, span, shift, exclusive)
    mean, free, log_total, exact = _natively(q, k, gate, v, beta, padding, span, shift, exclusive)
    if repeats > 1:  # key/value heads are read again whole
        exact = exact.unflatten(1, (-1, repeats)).any(-1).repeat_interleave(repeats, 1)
    for b, g in _again(exact, repeats):
        heads = slice(g * repeats, (g + 1) * repeats)
        read = _exactly(*_one(b, g, repeats, q, k, gate, v, beta, marks), exclusive)
        mean[b, :, heads], log_total[b, :, heads] = read.mean[0], read.log_total[0]
        if read.free is not None:
            free[b, :, heads] = read.free[0]
    return mean, free, log_total, exact


def _natively(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    padding: Tensor | None,
    span: Range | None,
    shift: Shift | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, free energy, log total and the heads [B, H] for which that is not good enough, by the compiled kernel."""
    mean, log_total = v.new_empty(*q.shape[:3], v.shape[3]), v.new_empty(q.shape[:3])
    free = v.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    doubts = torch.zeros(q.shape[0], q.shape[2], dtype=torch.long)
    padding = torch.empty(0, 0, dtype=torch.bool) if padding is None else padding
    arguments = [*_complete(q, k, gate, v, beta, shift), array(padding)]
    limits = math.exp(least_log(v.dtype)), FAR_BELOW
    results = [array(x) for x in (mean, free, log_total, doubts)]
    native("chunked").forward(*arguments, exclusive, *limits, *results)
    exact = doubts > 0
    if beta is not None and span is not None:
        cold = (beta < SMALL_BETA) & (beta * (span.top - span.bottom) > NARROW)
        exact |= cold.any(-1)[:, 0].repeat_interleave(q.shape[2] // v.shape[2], 1)
    return mean, free, log_total, exact


def _complete(
    q: Tensor, k: Tensor, gate: Tensor | None, v: Tensor, beta: Tensor | None, shift: Shift | None
) -> list[Any]:
    """What the compiled kernels read; empty arrays for what is not there."""
    nothing = v.new_empty(0, 0, 0)
    top, base = (None, None) if shift is None else shift
    line = [nothing if x is None else x[:, 0] for x in (top, base)]
    whole = (nothing if gate is None else gate, v.new_empty(0, 0) if beta is None else beta, *line)
    return [*memory(q, k, v), (*q.shape, *v.shape[2:]), *(array(x.contiguous()) for x in whole)]


def _by_products(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    padding: Tensor | None,
    span: Range | None,
    shift: Shift | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in plain torch."""
    length, width, repeats = q.shape[1], v.shape[-1], q.shape[2] // v.shape[2]
    c = arrange(q, k, gate, value_streams(v, beta, shift), exclusive)
    sums, totals = states(c)
    scores = c.scores()
    query = _scaled(c.q, c.into)
    y = query @ sums
    total = (query @ totals[..., None])[..., 0] + scores.sum(-1)
    y += scores @ c.x
    y, total = _flat(y, length), _flat(total[..., None], length)[..., 0].contiguous()  # [B, T, H, W], [B, T, H]
    empty = total <= 0
    if padding is not None:
        empty = empty | padding[..., None]
    log_total = total.log().masked_fill_(empty, -torch.inf)
    y = y / total.masked_fill_(empty, 1)[..., None]
    mean = y[..., :width].contiguous().masked_fill_(empty[..., None], 0)
    exact = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    free = v.new_empty(0, 0, 0, 0)
    if not bool(torch.isfinite(mean).all()):  # the sums themselves overflowed
        exact |= ~torch.isfinite(mean).all(-1).all(1)
    if beta is not None and shift is not None and span is not None:
        ratio = y[..., width:].contiguous().masked_fill_(empty[..., None], 1)
        free, doubtful = logarithm(ratio, beta, shift.per_head(repeats), span)
        exact |= doubtful
        torch.maximum(free, mean, out=free).masked_fill_(empty[..., None], 0)
    return mean, free, log_total, exact


def _again(exact: Tensor, repeats: int) -> list[tuple[int, int]]:
    """Sequences and key/value heads to be read again."""
    if not bool(exact.any()):
        return []
    found: list[tuple[int, int]] = exact.unflatten(1, (-1, repeats)).any(-1).nonzero().tolist()
    return [(b, g) for b, g in found]


def _one(
    b: int,
    g: int,
    repeats: int,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """The arguments of one sequence and key/value head."""
    row, group = slice(b, b + 1), slice(g, g + 1)
    return (
        q[row, :, g * repeats : (g + 1) * repeats].contiguous(),
        k[row, :, group].contiguous(),
        None if gate is None else gate[row, :, group].contiguous(),
        v[row, :, group].contiguous(),
        None if beta is None else beta[group].contiguous(),
        None if marks is None else marks[row].contiguous(),
    )


@_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = v.new_empty(*q.shape[:3], v.shape[3])
    free = v.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    return mean, free, v.new_empty(q.shape[:3]), v.new_empty(q.shape[0], q.shape[2], dtype=torch.bool)


@torch.library.custom_op("femixer::chunked_read_backward", mutates_args=())
def _read_backward(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    mean: Tensor,
    free: Tensor,
    log_total: Tensor,
    exact: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    repeats = q.shape[2] // v.shape[2]
    shift = None if beta is None else value_range(v, beta, _padding(marks)[1])[1]
    given = to_mean, to_free, to_log, q, k, gate, v, beta, shift, mean, free, log_total, exact, exclusive
    d_q, d_k, d_gate, d_v, d_beta = (_gradients_natively if compiled(v) else _gradients_by_products)(*given)
    for b, g in _again(exact, repeats):
        arguments = _one(b, g, repeats, q, k, gate, v, beta, marks)
        at = slice(b, b + 1), slice(None), slice(g * repeats, (g + 1) * repeats)
        results = _exact_gradients(
            arguments, to_mean[at], None if to_free is None else to_free[at], to_log[at], exclusive
        )
        d_q[at], d_k[b, :, g], d_v[b, :, g] = results[0], results[1][0, :, 0], results[3][0, :, 0]
        if gate is not None:
            d_gate[b, :, g] = results[2][0, :, 0, 0]
        if beta is not None:
            d_beta[g] += results[4][0]
    return d_q, d_k, d_gate, d_v, v.new_empty(0) if beta is None else d_beta.to(beta.dtype)


def _gradients_natively(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    shift: Shift | None,
    mean: Tensor,
    free: Tensor,
    log_total: Tensor,
    exact: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, gate, v and beta, by the compiled kernel, without those of heads that were read exactly."""
    repeats = q.shape[2] // v.shape[2]
    d_q, d_k, d_v = (v.new_zeros(x.shape) for x in (q, q, mean))
    d_gate = v.new_zeros(*q.shape[:3] if gate is not None else (0, 0, 0))
    d_beta = v.new_zeros(q.shape[0], q.shape[2], v.shape[3])
    arguments = _complete(q, k, gate, v, beta, shift)
    gradients = (to_mean, free if to_free is None else to_free, to_log)
    rest = [array(x) for x in (mean, free, log_total, exact, *gradients, d_q, d_k, d_gate, d_v, d_beta)]
    native("chunked").backward(*arguments, exclusive, *rest)
    if gate is not None:
        d_gate = _fold(d_gate[..., None], repeats)[..., 0]
    return d_q, _fold(d_k, repeats), d_gate, _fold(d_v, repeats), d_beta.sum(0).unflatten(0, (-1, repeats)).sum(1)


def _gradients_by_products(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    shift: Shift | None,
    mean: Tensor,
    free: Tensor,
    log_total: Tensor,
    exact: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same in plain torch."""
    length, heads, repeats = q.shape[1], q.shape[2], q.shape[2] // v.shape[2]
    streams = value_streams(v, beta, shift)
    c = arrange(q, k, gate, streams, exclusive)
    left_out = (log_total == -torch.inf) | exact[:, None]
    inverse = torch.exp(-log_total.masked_fill(left_out, 0)).masked_fill_(left_out, 0)[..., None]
    to_sums, to_total, d_beta = _to_sums(to_mean, to_free, to_log, mean, free, inverse, beta, shift, left_out)
    n = _chunks(to_sums, heads, c.q.shape[2] * c.q.shape[3])
    z = _chunks(to_total, heads, c.q.shape[2] * c.q.shape[3])
    d_q, d_k, d_x, flow = _products(c, n, z)
    d_q = _flat(d_q, length).contiguous()
    d_k, d_x = (_fold(_flat(each, length), repeats) for each in (d_k, d_x))
    d_gate = v.new_empty(0)
    if gate is not None and flow is not None:
        d_gate = _fold(_flat(flow[..., None], length), repeats)[..., 0]
        d_gate = d_gate.masked_fill(gate <= WIPE, 0)
    width = v.shape[-1]
    d_v = d_x[..., :width]
    if beta is not None and shift is not None:
        weighted = d_x[..., width:] * (
            streams[..., width:] if shift.base is None else streams[..., width:] + shift.base
        )
        d_v = torch.addcmul(d_v, weighted, beta)
        d_beta = d_beta.unflatten(0, (-1, repeats)).sum(1) + (weighted * (v - shift.top)).sum((0, 1))
    return d_q, d_k, d_gate, d_v.contiguous(), d_beta


def _exact_gradients(
    arguments: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None],
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    exclusive: bool,
) -> tuple[Tensor, ...]:
    q, k, gate, v, beta, marks = arguments
    state = FastWeights.empty(k, v, beta)
    gate = None if gate is None else gate[..., None].contiguous()
    to_free = None if to_free is None else to_free.contiguous()
    return fast_weights._read_backward(
        to_mean.contiguous(),
        to_free,
        to_log.contiguous(),
        torch.zeros_like(state.sums),
        q,
        k,
        gate,
        v,
        beta,
        marks,
        *state,
        exclusive,
    )


def _to_sums(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    mean: Tensor,
    free: Tensor,
    inverse: Tensor,
    beta: Tensor | None,
    shift: Shift | None,
    left_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the streams' sums [B, T, H, W] and of the total weight [B, T, H, 1]; of beta [H, D] through the
    logarithm. mean = y_v / Z; F = top + log(base + y_e / Z) / beta."""
    to_mean = to_mean.masked_fill(left_out[..., None], 0)
    to_total = to_log.masked_fill(left_out, 0)[..., None] - (to_mean * mean).sum(-1, keepdim=True)
    if to_free is None or beta is None or shift is None:
        return to_mean * inverse, to_total * inverse, mean.new_zeros(0)
    repeats = mean.shape[2] // beta.shape[0]
    temperature = beta.repeat_interleave(repeats, 0)
    per_head = shift.per_head(repeats)
    slope = (to_free / temperature).masked_fill_(left_out[..., None], 0)
    below = (free - per_head.top).masked_fill_(left_out[..., None], 0)
    d_beta = -(slope * below).sum((0, 1))
    ratio = exp_minus(below.mul_(temperature), per_head.base)  # y_e / Z
    slope.div_(ratio if per_head.base is None else ratio + per_head.base)
    to_total = to_total - (slope * ratio).sum(-1, keepdim=True)
    return torch.cat([to_mean, slope], -1).mul_(inverse), to_total * inverse, d_beta


def _products(c: Chunks, n: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, x and the gates [B, H, N, C] from those of the sums n [B, H, N, C, W] and of the total z."""
    sums, totals = states(c)
    query = _scaled(c.q, c.into)
    back, back_total = query.mT @ n, (query * z).sum(-2)
    _accumulate(back, back_total, c.whole, backwards=True)
    scores = c.scores()
    to_scores = (n @ c.x.mT).add_(z)
    crossing = None if c.decay is None else to_scores * scores
    to_scores *= c.seen if c.decay is None else c.decay
    keys = _scaled(c.k, c.out)
    d_x = scores.mT @ n
    d_x += keys @ back
    from_past = (n @ sums.mT).addcmul_(z, totals[..., None, :])
    to_future = (c.x @ back.mT).add_(back_total[..., None, :])
    flow = None
    if crossing is not None and c.into is not None and c.out is not None:
        # What flows across a gate: pairs within the chunk, reads of the past after it, writes to the future before it,
        # and what passes the whole chunk.
        after = crossing.sum(-1) - crossing.sum(-2) + (from_past * query).sum(-1)
        before = (to_future * keys).sum(-1)
        through = (sums * back).sum((-1, -2)) + (totals * back_total).sum(-1)
        through = through * c.into[..., -1]
        if c.segment is None:
            later = after.flip(-1).cumsum(-1).flip(-1)
        else:  # no rounding of one segment may reach another
            same = (c.segment[..., None] == c.segment[..., None, :]).to(after.dtype).triu()
            later = (same @ after[..., None])[..., 0]
        flow = later + before.cumsum(-1) - before + through[..., None]
    d_q = to_scores @ c.k
    d_q += _scaled(from_past, c.into)
    d_k = to_scores.mT @ c.q
    d_k += _scaled(to_future, c.out)
    return d_q, d_k, d_x, flow


def _fold(x: Tensor, repeats: int) -> Tensor:
    """[B, T, H, W] -> [B, T, G, W]: repeats summed."""
    return x.contiguous() if repeats == 1 else x.unflatten(2, (-1, repeats)).sum(3)


@_read_backward.register_fake
def _(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_gate = v.new_empty(0 if gate is None else gate.shape)
    return d_q, d_k, d_gate, d_v, v.new_empty(0) if beta is None else torch.empty_like(beta)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[3])


def _backward(ctx, to_mean, to_free, to_log, _):  # type: ignore[no-untyped-def]
    q, k, gate, v, beta, *rest = ctx.saved_tensors
    to_free = None if beta is None else to_free.contiguous()
    d_q, d_k, d_gate, d_v, d_beta = _read_backward(
        to_mean.contiguous(), to_free, to_log.contiguous(), q, k, gate, v, beta, *rest, ctx.exclusive
    )
    return d_q, d_k, None if gate is None else d_gate, d_v, None if beta is None else d_beta, None, None


_read.register_autograd(_backward, setup_context=_setup)
