"""The backward of decayed linear attention in torch's operations, level by level as the forward pass.

With w_t(i) the weights of tokens and E = beta F + log total,

    d w_t(i) = <cotangent of the streams at t, (v_i, 1)> + sum_d slope_t exp(beta v_i - E_t),   slope = dF / beta

Gradients of states are signed: they are scanned as the logarithms of their positive and negative parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.decayed_linear.plain_blocks import (
    NOTHING,
    Pairs,
    Readers,
    Tokens,
    arranged,
    block_of,
    by_group,
    kept_over,
    linear_state,
    logarithm,
    pairs_of,
    plan,
    readers_of,
    scan_chunks,
    states_before,
    times,
    together,
)
from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.operator import filled

# Exponentials of more than this are of tokens that nobody sees.
MOST = 600.0


class Cotangents(NamedTuple):
    """Gradients of what tokens read: of the sums of the streams (v, 1) [B, G, R, T, D + 1] and of the logarithms
    `energy` of the sums of exponentials [B, G, R, T, D]."""

    stream: Tensor
    slope: Tensor | None
    energy: Tensor | None

    def grouped(self, size: int) -> Cotangents:
        return Cotangents(*(None if x is None else x.unflatten(3, (-1, size)) for x in self))  # type: ignore[arg-type]

    def reached(self, top: Tensor, far: Tensor) -> Tensor:
        """Gradients of sums of exponentials that are read times exp(top + far)."""
        assert self.slope is not None
        assert self.energy is not None
        return (top - self.energy).add_(far).clamp_(max=MOST).exp_().mul_(self.slope)


def _cotangents(
    grads: list[Tensor], results: tuple[Tensor, ...], beta: Tensor | None, groups: int, length: int
) -> tuple[Cotangents, Tensor | None]:
    """mean = sum_v / total, F = (energy - log total) / beta, or the mean where that is larger; and the gradient of beta
    through the division."""
    to_mean, to_free, to_log = (x.double() for x in grads[:3])
    mean, free, log_total = (x.double() for x in results[:3])
    empty = (log_total == -torch.inf)[..., None]
    log_total = log_total[..., None].masked_fill(empty, 0)
    to_total = to_log[..., None]
    parts, d_beta, width = [], None, mean.shape[-1]
    if beta is not None:
        temperature = beta.double().repeat_interleave(mean.shape[2] // groups, 0)
        at_mean = free <= mean
        slope = (to_free / temperature).masked_fill(at_mean, 0)
        to_mean = to_mean + to_free.where(at_mean, 0)
        to_total = to_total - slope.sum(-1, keepdim=True)
        d_beta = -(slope * free).sum((0, 1)).unflatten(0, (groups, -1)).sum(1)
        parts = [slope, temperature * free + log_total]
    to_total = to_total - (to_mean * mean).sum(-1, keepdim=True)
    inverse = (-log_total).exp().masked_fill(empty, 0)
    every = by_group(torch.cat([torch.cat([to_mean, to_total], -1) * inverse, *parts], -1), groups, length)
    stream, *rest = every.split([width + 1, *([width] * len(parts))], -1)
    return Cotangents(stream, *(rest or (None, None))), d_beta


class Gradients(NamedTuple):
    """Of q [B, G, R, T, E], k [B, G, 1, T, E], v and beta v [B, G, 1, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor | None

    def flat(self, dims: int) -> Gradients:
        """T as one dimension, and of what heads share the sum."""
        q, *shared = (None if x is None else x.flatten(3, 2 + dims) for x in self)
        repeats = self.q.shape[2]
        shared = [x if x is None or repeats == 1 else x.sum(2, keepdim=True) for x in shared]
        return Gradients(q, *shared)  # type: ignore[arg-type]

    def plus(self, others: Gradients | None) -> Gradients:
        """Added to these."""
        if others is not None:
            for x, y in zip(self, others, strict=True):
                if x is not None and y is not None:
                    x.add_(y)
        return self


def _level_gradients(p: Pairs, c: Cotangents) -> Gradients:
    q_factor, k_factor = p.factors
    block, (blocks, group, size) = p.block, p.scores.shape[-3:]
    c = c.grouped(group)
    decay = (p.far if block.slow is None else p.far + block.slow.mT).exp()
    d_scores = (c.stream @ p.stream.mT).unflatten(-1, (blocks, size)).transpose(-2, -3) * decay
    d_v = together(p.scores * decay).mT @ c.stream[..., :-1]
    d_z = None
    if block.top is not None:
        reached = Cotangents(*(None if x is None else x[:, :, :, :, None] for x in c)).reached(block.top, p.far)  # type: ignore[arg-type]
        d_z = p.scores.mT @ reached
        if block.x is None:
            d_scores = d_scores + reached.sum(-1, keepdim=True)
        else:
            d_scores, d_z = d_scores + reached @ block.x.mT, d_z * block.x
        d_z = d_z.flatten(4, 5)
    if q_factor is None:
        rows = together(d_scores)
        d_q, d_k = rows @ block.k.flatten(4, 5), rows.mT @ p.q
        d_k = d_k if k_factor is None else d_k * k_factor.flatten(4, 5)
    else:
        d_q = ((d_scores @ block.k) * q_factor).sum(-3)
        d_k = times(d_scores.mT @ (p.q[:, :, :, :, None] * q_factor), k_factor).flatten(4, 5)
    return Gradients(d_q, d_k, d_v, d_z).flat(2)


def _signed(x: Tensor) -> Tensor:
    """Positive and negative part side by side."""
    return torch.cat([x, -x], -1).relu_()


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


def _read_gradients(readers: Readers, c: Cotangents, states: Tensor) -> tuple[Tensor, Tensor]:
    """Of what tokens read of the states before their chunks: gradients of q [..., T, E] and, as signed logarithms, of
    the states [..., N, E, 4 D + 2 or 2 D + 2]."""
    sums, energies, top = linear_state(states, c.stream.shape[-1] - 1)
    cotangent = c.stream * readers.far.exp()
    d_q = cotangent @ sums.mT
    level = logarithm(_signed((readers.q.mT @ cotangent).sum(2, keepdim=True)))
    if c.slope is not None and c.energy is not None:
        d_q += c.reached(top, readers.far) @ energies.mT
        reach = readers.far - c.energy
        highest = reach.amax((2, -2), keepdim=True)
        added = readers.q.mT @ reach.sub_(highest).exp_().mul_(c.slope)
        level = torch.cat([level, logarithm(_signed(added.sum(2, keepdim=True))) + _twice(highest)], -1)
    return times(d_q, readers.factor), level


def _last_gradients(to_sums: Tensor, top: Tensor, width: int) -> Tensor:
    """Gradients of the last state's sums [B, G, E, W] as signed logarithms [B, G, 1, 1, E, W]."""
    level = logarithm(_signed(to_sums[..., : width + 1]))
    if to_sums.shape[-1] > width + 1:
        energies = logarithm(_signed(to_sums[..., width + 1 :])) - _twice(top.clamp(min=NOTHING)[:, :, None])
        level = torch.cat([level, energies], -1)
    return level[:, :, None, None]


def _first_gradients(to: Shifted, top: Tensor) -> Tensor:
    """Of the first state's sums."""
    if to.energetic is None or to.top is None:
        return to.linear
    return torch.cat([to.linear, to.energetic * (to.top + top[:, :, None]).clamp_(max=MOST).exp_()], -1)


class Shifted(NamedTuple):
    """Gradients of states [..., E, W]: of the sums of the streams; of those of exponentials, relative to exp(top)."""

    linear: Tensor
    energetic: Tensor | None
    top: Tensor | None


def _shifted(level: Tensor, width: int) -> Shifted:
    """From signed logarithms."""
    energetic = level.shape[-1] > 2 * width + 2
    plus, minus, *energies = level.split([width + 1] * 2 + [width] * (2 if energetic else 0), -1)
    linear = plus.exp() - minus.exp()
    if not energies:
        return Shifted(linear, None, None)
    top = torch.maximum(*energies).amax(-2, keepdim=True)
    return Shifted(linear, (energies[0] - top).exp() - (energies[1] - top).exp(), top)


def _write_gradients(d_q: Tensor, chunks: Tokens, to: Shifted) -> Gradients:
    """Of what tokens wrote into the states after their chunks, from the gradients of those; with that of q."""
    block, factor = block_of(chunks)
    stream = chunks.stream if block.slow is None else chunks.stream * block.slow.exp()
    d_k = stream @ to.linear.mT
    d_v = (block.k @ to.linear[..., :-1]) * stream[..., -1:]
    d_z = None
    if block.top is not None and to.energetic is not None and to.top is not None:
        x = (block.top + to.top).clamp_(max=MOST).exp_()
        x = x if block.x is None else block.x * x
        d_k += x @ to.energetic.mT
        d_z = x * (block.k @ to.energetic)
    return Gradients(d_q, times(d_k, factor), d_v, d_z)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """A gate's gradient is what flows across it: the sum of q dq - k dk over the tokens from it on."""
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = arguments
    (_, length, _, _), (groups, width), of_q = q.shape, v.shape[2:], q.dtype
    sizes, radix, chunk, padded = plan(length, gate)
    given = filled(grads[:4], results)
    c, d_beta = _cotangents(given, results, beta, groups, padded)
    tokens = arranged(k, gate, v, beta, marks, padded, chunk)
    q = by_group(q, groups, padded)
    found = None
    for size in sizes:
        found = _level_gradients(pairs_of(q, tokens, size, radix, size == 1 and not exclusive), c).plus(found)
    assert found is not None
    d_sums = end = None
    if sums is not None or keep or padded > chunk:
        chunks = tokens.grouped(-1, chunk)
        to_last, last, last_top = given[3].double(), results[3].double(), results[4].double()
        states = states_before(tokens, chunk, sums, top)[:, :, :, :-1]
        d_q, level = _read_gradients(readers_of(q, tokens, chunk), c.grouped(chunk), states)
        after = _last_gradients(to_last, last_top, width) if keep else torch.full_like(level[:, :, :, :1], NOTHING)
        level = torch.cat([after, level.flip(3)], 3)
        level = scan_chunks(F.pad(kept_over(chunks).flip(3), (0, 0, 0, 0, 1, 0)), level).flip(3)
        found = _write_gradients(d_q, chunks, _shifted(level[:, :, :, 1:], width)).flat(2).plus(found)
        if sums is not None and top is not None:
            d_sums = _first_gradients(_shifted(level[:, :, 0, 0], width), top).to(sums.dtype)
        end = (to_last * last).sum(-1)[:, :, None, None] if keep else None
    d_q, d_k, d_v, d_z = found
    d_gate = None
    if gate is not None:
        flow = (q * d_q).sum(2, keepdim=True) - tokens.k * d_k
        flow = flow.flip(3).cumsum(3).flip(3)
        flow = flow if end is None else flow + end
        d_gate = flow if gate.shape[3] > 1 else flow.sum(-1, keepdim=True)
        if marks is not None:
            fixed = F.pad(is_padding(marks) | is_start(marks), (0, padded - length))
            d_gate = d_gate.masked_fill(fixed[:, None, None, :, None], 0)
    if marks is not None:
        d_k = d_k.masked_fill(F.pad(is_padding(marks), (0, padded - length))[:, None, None, :, None], 0)
    if beta is not None and d_z is not None and d_beta is not None:
        d_beta = (d_beta + (d_z * tokens.stream[..., :-1]).sum((0, 2, 3))).to(beta.dtype)
        d_v = d_v + d_z * beta.double()[:, None, None]

    def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x[:, :, :, :length].permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)

    d_gate = None if d_gate is None or gate is None else rows(d_gate, gate.dtype)
    return rows(d_q, of_q), rows(d_k, k.dtype), d_gate, rows(d_v, v.dtype), d_beta, None, d_sums, None
