"""Decayed linear attention, exact for values of any range: mean, free energy and log of the total weight.

    weight of token i at t:  sum_m q_t[m] k_i[m] exp(gate_{i+1}[m] + ... + gate_t[m]),   q, k >= 0, gate <= 0

gate has one entry per key channel or one per head. Everything is summed in float64; the exponentials exp(beta v) are
kept relative to their largest exponent so far.

Axes: B batch, T tokens, H heads, G key/value heads, E key channels, D value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.backend import array, compiled, native, or_empty
from femixer.kernels.reading import TINY, Reading
from femixer.layout import PADDING, START

CHUNK = 16
# A log decay that leaves nothing even of exp(beta v), and yet can be summed without losing the digits of others.
WIPE = -3e4


class FastWeights(NamedTuple):
    """State: sums [B, G, E, 2 D + 1 or D + 1] of k_i (v_i, 1, exp(beta v_i - top)), and top [B, G, D], float64."""

    sums: Tensor
    top: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, beta: Tensor | None) -> FastWeights:
        batch, _, groups, width = v.shape
        columns = width + 1 if beta is None else 2 * width + 1
        sums = v.new_zeros(batch, groups, k.shape[3], columns, dtype=torch.float64)
        return cls(sums, v.new_full((batch, groups, width), -torch.inf, dtype=torch.float64))


def fast_weight_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: FastWeights,
    exclusive: bool = False,
) -> Reading:
    """q [B, T, H, E], k [B, T, G, E] nonnegative; gate [B, T, G, E or 1]; v [B, T, G, D]; beta [G, D]; marks [B, T].

    exclusive: a token reads those before it, decayed by its own gate.
    """
    if not compiled(v):
        return _plain(q, k, gate, v, beta, marks, state, exclusive)
    q, k, v = (x.contiguous() for x in (q, k, v))
    gate, beta, marks = (None if x is None else x.contiguous() for x in (gate, beta, marks))
    sums, top = (x.contiguous() for x in state)
    mean, free, log_total, *last = _read(q, k, gate, v, beta, marks, sums, top, exclusive)
    return Reading(mean, None if beta is None else free, log_total, FastWeights(*last))


def _plain(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: FastWeights,
    exclusive: bool,
) -> Reading:
    """The same in plain torch, a few tokens at a time: pairs of tokens in log space, the past through the state."""
    dtype, repeats = v.dtype, q.shape[2] // k.shape[2]
    q = q.double().unflatten(2, (k.shape[2], repeats)).permute(0, 2, 3, 1, 4)  # [B, G, R, T, E]
    k, v = (x.double().transpose(1, 2) for x in (k, v))
    g = k.new_zeros(1, 1, 1, 1).expand(*k.shape[:3], 1) if gate is None else gate.double().transpose(1, 2)
    real = None
    if marks is not None:
        real = (marks != PADDING)[:, None, :, None]
        g = torch.where(real, g, 0).masked_fill((marks == START)[:, None, :, None], WIPE)
        k, v = torch.where(real, k, 0), torch.where(real, v, 0)
    b = None if beta is None else beta.double()[:, None]
    width = v.shape[-1]
    sums, top = state
    results = []
    for start in range(0, v.shape[2], CHUNK):
        at = slice(start, start + CHUNK)
        qc, kc, vc, gc = q[:, :, :, at], k[:, :, at], v[:, :, at], g[:, :, at]
        reach = gc.cumsum(2)
        steps = torch.arange(vc.shape[2], device=v.device)
        seen = steps[:, None] > steps if exclusive else steps[:, None] >= steps
        between = torch.where(seen[..., None], reach[:, :, :, None] - reach[:, :, None], 0)  # [B, G, t, i, E or 1]
        weight = torch.einsum("bgrte,bgtie,bgie->bgrti", qc, between.exp().expand(*between.shape[:4], kc.shape[-1]), kc)
        weight = torch.where(seen, weight, 0)
        decayed = qc * reach.exp()[:, :, None]
        past = decayed @ sums[:, :, None]  # [B, G, R, t, W]
        total = weight.sum(-1) + past[..., width]
        there = total > TINY
        safe = torch.where(there, total, 1)
        mean = (weight @ vc[:, :, None] + past[..., :width]) / safe[..., None]
        free = torch.zeros_like(mean)
        ones = torch.ones_like(vc[..., :1])
        # The exponentials of the chunk, relative to the largest that reaches its end.
        stream, scale = torch.cat([vc, ones], -1), torch.ones_like(top[..., :0])
        until = reach[:, :, -1:]
        ahead = until - reach
        if b is not None:
            exponent = b * vc
            slowest = ahead.detach().amax(-1, keepdim=True)
            arriving = top + until.detach().amax(-1)
            leaving = exponent.detach() + slowest
            if marks is not None:  # nothing of a segment that has ended may count
                wiped = ahead.detach().amax(-1, keepdim=True) < WIPE / 2
                arriving = arriving.masked_fill((until.detach().amax(-1) < WIPE / 2), -torch.inf)
                leaving = leaving.masked_fill(wiped, -torch.inf)
            new_top = torch.maximum(arriving, leaving.amax(2))
            pairs = torch.where(weight > 0, torch.where(weight > 0, weight, 1).log(), -torch.inf)
            terms = pairs[..., None] + exponent[:, :, None, None]
            energy = past[..., width + 1 :]
            before = torch.where(energy > 0, torch.where(energy > 0, energy, 1).log(), -torch.inf)
            before = before + torch.where(top > -torch.inf, top, 0)[:, :, None, None]
            every = torch.cat([terms, before[:, :, :, :, None]], -2)
            nothing = (every == -torch.inf).all(-2, keepdim=True)
            sum_of_all = every.masked_fill(nothing, 0).logsumexp(-2)
            free = (sum_of_all - safe.log()[..., None]) / b[:, None]
            free = torch.where(nothing[..., 0, :], mean, torch.maximum(free, mean))
            # Row m of a token's exponential decays by ahead[m]; relative to the slowest row nothing overflows.
            stream = torch.cat([stream, (exponent + slowest - new_top[:, :, None]).exp()], -1)
            scale = torch.where(top > -torch.inf, (arriving - new_top).exp(), 0)
            top = new_top
        results.append((mean, free, torch.where(there, safe.log(), -torch.inf)))
        keys = kc * ahead.exp()
        carried = sums[..., : width + 1] * until[:, :, 0, :, None].exp()
        fresh = keys.mT @ stream[..., : width + 1]
        if b is not None:
            slow_keys = kc * (ahead - ahead.detach().amax(-1, keepdim=True)).exp()
            relative = (until - until.detach().amax(-1, keepdim=True))[:, :, 0, :, None].exp()
            carried = torch.cat([carried, sums[..., width + 1 :] * relative * scale[:, :, None]], -1)
            fresh = torch.cat([fresh, slow_keys.mT @ stream[..., width + 1 :]], -1)
        sums = carried + fresh
    if not results:
        nothing_read = v.new_zeros(v.shape[0], 0, q.shape[1] * repeats, width, dtype=dtype)
        return Reading(nothing_read, None if beta is None else nothing_read, nothing_read[..., 0], state)
    mean, free, log_total = (torch.cat(parts, 3).flatten(1, 2).transpose(1, 2) for parts in zip(*results, strict=True))
    return Reading(
        mean.to(dtype), None if beta is None else free.to(dtype), log_total.to(dtype), FastWeights(sums, top)
    )


@torch.library.custom_op("femixer::fast_weight_read", mutates_args=())
def _read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mean = v.new_empty(*q.shape[:3], v.shape[3])
    free = v.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    log_total = v.new_empty(q.shape[:3])
    last, last_top = torch.empty_like(sums), torch.empty_like(top)
    arguments = map(array, _complete(q, k, gate, v, beta, marks, sums, top))
    native("fast_weights").forward(*arguments, exclusive, *map(array, (mean, free, log_total, last, last_top)))
    return mean, free, log_total, last, last_top


def _complete(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
) -> tuple[Tensor, ...]:
    """Empty tensors for what is not there."""
    gate = v.new_empty(0, 0, 0, 0) if gate is None else gate
    beta = v.new_empty(0, 0) if beta is None else beta
    marks = or_empty(marks)
    return q, k, gate, v, beta, marks, sums, top


@_read.register_fake
def _(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mean = v.new_empty(*q.shape[:3], v.shape[3])
    free = v.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    return mean, free, v.new_empty(q.shape[:3]), torch.empty_like(sums), torch.empty_like(top)


@torch.library.custom_op("femixer::fast_weight_read_backward", mutates_args=())
def _read_backward(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    to_last: Tensor,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v, d_sums = (torch.empty_like(x) for x in (q, k, v, sums))
    d_gate = v.new_empty(0, 0, 0, 0) if gate is None else torch.empty_like(gate)
    d_beta = torch.zeros_like(top)
    arguments = map(array, _complete(q, k, gate, v, beta, marks, sums, top))
    gradients = (to_mean, v.new_empty(0, 0, 0, 0) if to_free is None else to_free, to_log, to_last)
    results = (d_q, d_k, d_gate, d_v, d_beta, d_sums)
    native("fast_weights").backward(*arguments, exclusive, *map(array, (*gradients, *results)))
    return d_q, d_k, d_gate, d_v, v.new_empty(0) if beta is None else d_beta.sum(0).to(beta.dtype), d_sums


@_read_backward.register_fake
def _(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    to_last: Tensor,
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v, d_sums = (torch.empty_like(x) for x in (q, k, v, sums))
    d_gate = v.new_empty(0, 0, 0, 0) if gate is None else torch.empty_like(gate)
    return d_q, d_k, d_gate, d_v, v.new_empty(0) if beta is None else torch.empty_like(beta), d_sums


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(output[4])


def _backward(ctx, to_mean, to_free, to_log, to_last, _):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # once: recomputation (gradient checkpointing) gives them once
    gate, beta = saved[2], saved[4]
    to_free = None if beta is None else to_free.contiguous()
    d_q, d_k, d_gate, d_v, d_beta, d_sums = _read_backward(
        to_mean.contiguous(),
        to_free,
        to_log.contiguous(),
        to_last.contiguous(),
        *saved,
        ctx.exclusive,
    )
    d_gate = None if gate is None else d_gate
    d_beta = None if beta is None else d_beta
    return d_q, d_k, d_gate, d_v, d_beta, None, d_sums, None, None


_read.register_autograd(_backward, setup_context=_setup)
