"""Decayed linear attention in torch's operations; how is said in plain_blocks.py. The backward has the same levels:
with w_t(i) the weights of tokens and E = beta F + log total,

    d w_t(i) = <cotangent of the streams at t, (v_i, 1)> + sum_d slope_t exp(beta v_i - E_t),   slope = dF / beta

Gradients of states follow the same recurrence in reversed time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.decayed_linear.plain_blocks import (
    Pairs,
    Readers,
    States,
    arranged,
    by_group,
    pairs_of,
    plan,
    plus_product,
    read_level,
    read_past,
    readable,
    readers_of,
    recurrent,
    seen,
    states_of,
    times,
    together,
)
from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.operator import filled, wide_dtype
from femixer.kernels.reading import state_dtype, wide


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = arguments
    (batch, length, heads, _), (groups, width), dtype = q.shape, v.shape[2:], wide_dtype(v)
    sizes, radix, chunk, padded = plan(length, gate)
    tokens = arranged(k, gate, v, beta, marks, padded, chunk)
    q = by_group(q, groups, padded)
    total: Any = None
    energies: list[Any] = []
    for size in sizes:
        total, energy = read_level(pairs_of(q, tokens, size, radix, size == 1 and not exclusive), total)
        energies.append(energy)
    last, last_top = (q.new_empty(0, dtype=state_dtype(q.device)) for _ in range(2))
    if sums is not None or keep or padded > chunk:
        states = states_of(tokens.grouped(-1, chunk), sums, top)
        total, energy = read_past(readers_of(q, tokens, chunk), states, total)
        energies.append(energy)
        if keep:
            last, last_top = (x.to(state_dtype(x.device)) for x in states.last(width)[:2])
    if marks is not None:
        padding = F.pad(is_padding(marks), (0, padded - length))[:, None, None, :, None]
        total = total.masked_fill(padding, 0)
    weight = total[..., width:]
    empty = weight <= 0
    weight = weight.masked_fill(empty, 1)
    mean = total[..., :width] / weight
    log_total = weight.log()
    if beta is None:
        free = mean.new_empty(0, 0, 0, 0, dtype=dtype)
    else:
        energy = torch.stack(energies).logsumexp(0) - log_total
        free = torch.maximum(energy / beta.to(energy.dtype)[:, None, None], mean)  # of nothing the mean, which is zero
        free = _rows(free if marks is None else free.masked_fill(empty, 0), length, dtype)
    exact = q.new_zeros(batch, heads, dtype=torch.bool)
    mean, log_total = (_rows(x, length, dtype) for x in (mean, log_total.masked_fill(empty, -torch.inf)))
    return mean, free, log_total[..., 0], last, last_top, exact


def _rows(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """[B, G, R, T, W] -> [B, length, G R, W]"""
    return x[:, :, :, :length].permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)


class Cotangents(NamedTuple):
    """Gradients of what tokens read: of the sums of the streams (v, 1) [B, G, R, T, D + 1] and of the logarithms
    `energy` of the sums of exponentials [B, G, R, T, D]."""

    stream: Any
    slope: Any
    energy: Any

    def grouped(self, size: int) -> Cotangents:
        return Cotangents(*(None if x is None else x.unflatten(3, (-1, size)) for x in self))

    def reached(self, top: Tensor, far: Tensor | None) -> Tensor:
        """Gradients of sums of exponentials that are read times exp(top + far)."""
        most = 0.85 * math.log(torch.finfo(top.dtype).max)  # exponentials of more are of tokens that nobody sees
        exponent = top - self.energy
        return (exponent if far is None else exponent.add_(far)).clamp_(max=most).exp_().mul_(self.slope)


def _cotangents(
    grads: tuple[Tensor | None, ...], results: tuple[Tensor, ...], beta: Tensor | None, groups: int, length: int
) -> tuple[Cotangents, Tensor | None]:
    """mean = sum_v / total, F = (energy - log total) / beta, or the mean where that is larger; and minus the gradient
    of beta through the division."""
    to_mean, to_free = (wide(x) for x in filled(grads[:2], results))
    mean, free, log_total = (wide(x) for x in results[:3])
    empty = (log_total == -torch.inf)[..., None]
    log_total = log_total[..., None].masked_fill(empty, 0)
    parts, d_beta, width, repeats = [], None, mean.shape[-1], mean.shape[2] // groups
    if beta is None:
        falls = to_mean * mean
    else:
        temperature = beta.to(mean.dtype)
        temperature = temperature if repeats == 1 else temperature.repeat_interleave(repeats, 0)
        at_mean = free <= mean
        slope = (to_free / temperature).masked_fill(at_mean, 0)
        to_mean = torch.addcmul(to_mean, to_free, at_mean)
        d_beta = (slope * free).sum((0, 1))
        d_beta = d_beta if repeats == 1 else d_beta.unflatten(0, (groups, -1)).sum(1)
        parts, falls = [slope, torch.addcmul(log_total, temperature, free)], torch.addcmul(slope, to_mean, mean)
    falls = falls.sum(-1, keepdim=True)
    inverse = (-log_total).exp().masked_fill(empty, 0)
    to_total = -falls if grads[2] is None else wide(grads[2])[..., None] - falls
    parts = [to_mean * inverse, to_total * inverse, *parts]
    every = torch.cat([x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4) for x in parts], -1)
    if length > every.shape[3]:
        every = F.pad(every, (0, 0, 0, length - every.shape[3]))
    stream, *rest = every.split([width + 1, *([width] * (len(parts) - 2))], -1)
    return Cotangents(stream, *(rest or (None, None))), d_beta


class Gradients(NamedTuple):
    """Of q [B, G, R, T, E], k [B, G, 1, T, E], v and beta v [B, G, 1, T, D]; None for zeros."""

    q: Any = None
    k: Any = None
    v: Any = None
    z: Any = None


def _plus(total: Tensor | None, x: Tensor) -> Tensor:
    """x [B, G, R or 1, n, T / n, W], summed over the heads that share it, added to total."""
    x = (x if x.shape[2] == 1 else x.sum(2, keepdim=True)).flatten(3, 4)
    return x if total is None else total.add_(x)


def _shared(x: Tensor) -> Tensor:
    """[B, G, R, n, t, W] -> [B, G, 1, n, R t, W]: rows of all heads that share keys."""
    return x.transpose(2, 3).flatten(3, 4)[:, :, None]


def _level_gradients(p: Pairs, c: Cotangents, found: Gradients) -> Gradients:
    """Added to those found."""
    q_factor, k_factor = p.factors
    block, (blocks, group, size) = p.block, p.scores.shape[-3:]
    c = c.grouped(group)
    decay = p.decay()
    d_scores = times((c.stream @ p.stream.mT).unflatten(-1, (blocks, size)).transpose(-2, -3), decay)
    d_v = plus_product(found.v, _shared(together(times(p.scores, decay))).mT, _shared(c.stream[..., :-1]))
    d_z = None
    if block.top is not None:
        reached = Cotangents(*(None if x is None else x[:, :, :, :, None] for x in c)).reached(block.top, p.far)
        d_z = p.scores.mT @ reached
        if block.x is None:
            d_scores = d_scores + reached.sum(-1, keepdim=True)
        else:
            d_scores, d_z = d_scores + reached @ block.x.mT, d_z * block.x
        d_z = _plus(found.z, d_z.flatten(4, 5))
    d_scores = seen(d_scores, p.hidden, 0.0) if p.far is None else d_scores
    if q_factor is None:
        rows = together(d_scores)
        d_q = plus_product(found.q, rows, block.k.flatten(4, 5))
        if k_factor is None:
            d_k = plus_product(found.k, _shared(rows).mT, _shared(p.q))
        else:
            d_k = _plus(found.k, (rows.mT @ p.q) * k_factor.flatten(4, 5))
    else:
        # In place: these are the largest of all tensors, and nobody reads them any more.
        d_q = (d_scores @ block.k).mul_(q_factor).sum(-3).flatten(3, 4)
        d_q = d_q if found.q is None else d_q.add_(found.q)
        readers = p.q[:, :, :, :, None]
        readers = q_factor.mul_(readers) if readers.shape[2] == 1 else readers * q_factor
        d_k = _plus(found.k, times(d_scores.mT @ readers, k_factor).flatten(4, 5))
    return Gradients(d_q, d_k, d_v, d_z)


def _read_gradients(readers: Readers, c: Cotangents, states: States, found: Gradients) -> tuple[Gradients, Tensor]:
    """Of what tokens read of the states before their chunks: with that of q, and of the states' sums [..., N, E, W]."""
    (sums, top, factor), (q, q_factor, far) = readable(states.sums, states.top), readers
    cotangent = times(c.stream, None if far is None else far.exp())
    if top is not None:
        cotangent = torch.cat([cotangent, c.reached(top, far)], -1)
    to_sums = q.mT @ cotangent
    to_sums = to_sums.sum(2, keepdim=True) if to_sums.shape[2] > 1 else to_sums
    if q_factor is None:
        d_q = plus_product(found.q, cotangent, sums.mT)
    else:
        d_q = (cotangent @ sums.mT).mul_(q_factor).flatten(3, 4).add_(found.q)
    return found._replace(q=d_q), times(to_sums, factor)


def _write_gradients(states: States, to: Tensor, found: Gradients) -> Gradients:
    """With those of what tokens wrote into the states after their chunks, from the gradients of the states' sums."""
    (block, factor, streams), energetic = states.by, states.top is not None
    d_streams, slow = block.k @ to, block.slow
    d_k = plus_product(found.k, streams, to.mT) if factor is None else _plus(found.k, (streams @ to.mT) * factor)
    width = (streams.shape[-1] - 1) // (2 if energetic else 1)
    d_v = _plus(found.v, times(d_streams[..., :width], None if slow is None else slow.exp()))
    d_z = _plus(found.z, d_streams[..., width + 1 :] * streams[..., width + 1 :]) if energetic else None
    return Gradients(found.q, d_k, d_v, d_z)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """A gate's gradient is what flows across it: the sum of q dq - k dk over the tokens from it on."""
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = arguments
    (_, length, _, _), (groups, width) = q.shape, v.shape[2:]
    sizes, radix, chunk, padded = plan(length, gate)
    c, d_beta = _cotangents(grads, results, beta, groups, padded)
    tokens = arranged(k, gate, v, beta, marks, padded, chunk)
    q = by_group(q, groups, padded)
    found = Gradients()
    for size in sizes:
        found = _level_gradients(pairs_of(q, tokens, size, radix, size == 1 and not exclusive), c, found)
    d_sums = end = None
    if sums is not None or keep or padded > chunk:
        states = states_of(tokens.grouped(-1, chunk), sums, top)
        found, level = _read_gradients(readers_of(q, tokens, chunk), c.grouped(chunk), states, found)
        level = level if sums is not None else level[:, :, :, 1:]  # nothing is before the first chunk
        if keep:
            to_last = wide(torch.zeros_like(results[3]) if grads[3] is None else grads[3])
            end = (to_last * wide(results[3])).sum(-1)[:, :, None, None]
            level = torch.cat([level, times(to_last, states.last(width)[2])[:, :, None, None]], 3)
        else:
            level = F.pad(level, (0, 0, 0, 0, 0, 1))
        level = recurrent(states.decay, level, marks is not None, states.pairs, backwards=True)
        to_written = times(level[:, :, :, -states.sums.shape[3] :], states.scale)
        found = _write_gradients(states, to_written.contiguous(), found)
        d_sums = None if sums is None else level[:, :, 0, 0].to(sums.dtype)
    d_q, d_k, d_v, d_z = found
    d_gate = None
    if gate is not None:
        over = (-1,) if gate.shape[3] == 1 else ()  # one gate for all key channels
        left = q * d_q if q.shape[2] == 1 else (q * d_q).sum(2, keepdim=True)
        flow = left.addcmul_(tokens.k, d_k, value=-1)
        d_gate = (flow.sum(over, keepdim=True) if over else flow).flip(3).cumsum(3).flip(3)
        if end is not None:
            d_gate = d_gate + (end.sum(over, keepdim=True) if over else end)
        if marks is not None:
            fixed = F.pad(is_padding(marks) | is_start(marks), (0, padded - length))
            d_gate = d_gate.masked_fill(fixed[:, None, None, :, None], 0)
    if marks is not None:
        d_k = d_k.masked_fill(F.pad(is_padding(marks), (0, padded - length))[:, None, None, :, None], 0)
    if beta is not None and d_z is not None and d_beta is not None:
        d_beta = ((d_z * tokens.stream[..., :-1]).sum((0, 2, 3)) - d_beta).to(beta.dtype)
        d_v = torch.addcmul(d_v, d_z, beta.to(d_z.dtype)[:, None, None])
    d_q, d_k, d_v = (_rows(x, length, like.dtype) for x, like in ((d_q, arguments[0]), (d_k, k), (d_v, v)))
    d_gate = None if d_gate is None or gate is None else _rows(d_gate, length, gate.dtype)
    return d_q, d_k, d_gate, d_v, d_beta, None, d_sums, None
