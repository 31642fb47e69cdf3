"""The two streams of a one-pass read, v and exp(beta (v - top)), and the logarithm that turns their sums into F.

Axes: B batch, T queries, S keys, H heads, G key/value heads, D value width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.kernels.backend import array, eager_kernels, memory, native

# Sums below exp(-60) in float32 begin to lose terms to underflow; gradients divide by them.
UNDERFLOW_MARGIN = 27.0
# A channel that spans less than this many nats is read as 1 + sum p (exp - 1): the rounding of p then cancels.
NARROW = 2.0
# Below this temperature a wide channel's logarithm, divided by beta, is not good to 1e-5.
SMALL_BETA = 0.1
LOG2_E = math.log2(math.e)
# F = top + log(sum) / beta loses digits where F lies this many times its own size (or 1) below top.
FAR_BELOW = 40.0
_NO_HEADS = np.empty((0, 0), dtype=np.bool_)


def far_below(free: Tensor, top: Tensor) -> Tensor:
    """Where the difference to `top` has too few digits left to be 1e-5 max(1, |F|)."""
    return top - free > FAR_BELOW * free.abs().clamp_min(1)


class Shift(NamedTuple):
    """How a channel is read: as top + log(base + sum p (exp(beta (v - top)) - base)) / beta; [B, 1, heads, D] each.

    base is 1 in narrow channels and 0 in others, and may be None if it is 0 everywhere.
    """

    top: Tensor
    base: Tensor | None

    def at(self, groups: slice) -> Shift:
        return Shift(self.top[:, :, groups], None if self.base is None else self.base[:, :, groups])

    def per_head(self, repeats: int) -> Shift:
        if repeats == 1:
            return self
        top, base = (None if x is None else x.repeat_interleave(repeats, 2) for x in self)
        assert top is not None
        return Shift(top, base)


class Range(NamedTuple):
    """Smallest and largest value of each channel, [B, 1, G, D]."""

    bottom: Tensor
    top: Tensor


def value_range(v: Tensor, beta: Tensor, run_k: Tensor | None) -> tuple[Range, Shift]:
    """Of values [B, S, G, D] that are not padding, and how they are read."""
    if run_k is None and eager_kernels(v):
        bottom, top, base = v.new_empty(3, v.shape[0], *v.shape[2:])
        arrays = map(array, (bottom, top, base))
        native("streams").span(*memory(v), v.shape[1], array(beta.contiguous()), NARROW, *arrays)
        return Range(bottom[:, None], top[:, None]), Shift(top[:, None], base[:, None])
    if run_k is None:
        span = Range(v.amin(1, keepdim=True), v.amax(1, keepdim=True))
    else:
        padding = (run_k < 0)[..., None, None]
        bottom = v.masked_fill(padding, torch.inf).amin(1, keepdim=True)
        top = v.masked_fill(padding, -torch.inf).amax(1, keepdim=True)
        empty = top < bottom
        span = Range(bottom.masked_fill(empty, 0), top.masked_fill(empty, 0))
    narrow = beta * (span.top - span.bottom) <= NARROW
    return span, Shift(span.top, narrow.to(v.dtype) if bool(narrow.any()) else None)


def exp_minus(x: Tensor, base: Tensor | None) -> Tensor:
    """exp(x) - base without cancellation; x is used up."""
    if base is None:
        return x.mul_(LOG2_E).exp2_()  # on a CPU exp2 takes half the time of exp
    return torch.where(base > 0, x.expm1(), x.exp())


def log_plus(x: Tensor, base: Tensor | None) -> Tensor:
    """log(x + base) without cancellation; x is used up."""
    if base is None:
        return x.log_()
    return torch.where(base > 0, x.log1p(), x.log())


def value_streams(v: Tensor, beta: Tensor | None, shift: Shift | None) -> Tensor:
    """[v, exp(beta (v - top)) - base] of width 2D; v alone without beta."""
    if beta is None or shift is None:
        return v
    if eager_kernels(v):
        streams = v.new_empty(*v.shape[:-1], 2 * v.shape[-1])
        native("streams").streams(*memory(v), *_arrays(beta, shift), array(streams))
        return streams
    # Padding may lie above top: its weight is zero, but its exponential must not overflow.
    exponent = (v - shift.top).clamp_(max=0).mul_(beta)
    return torch.cat([v, exp_minus(exponent, shift.base)], -1)


def least_log(dtype: torch.dtype) -> float:
    return math.log(torch.finfo(dtype).tiny) + UNDERFLOW_MARGIN


# What the compiled kernel compares with: the least total, the nats of a narrow channel, the least beta of others, and
# how far below top F may lie.
LIMITS = np.array([math.exp(least_log(torch.float32)), NARROW, SMALL_BETA, FAR_BELOW], dtype=np.float32)


def logarithm(total: Tensor, beta: Tensor, shift: Shift, span: Range) -> tuple[Tensor, Tensor]:
    """F = top + log(total + base) / beta [B, T, H, D], and the heads [B, H] for which that is not good to 1e-5."""
    exact = torch.zeros(total.shape[0], total.shape[2], dtype=torch.bool, device=total.device)
    least = math.exp(least_log(total.dtype))
    # The smallest sum settles the common case; a base of 1 only makes sums larger.
    if bool(total.amin() < least):
        exact |= ((total if shift.base is None else total + shift.base) < least).any(-1).any(1)
    log_total = log_plus(total, shift.base)
    free = torch.addcdiv(
        shift.top, log_total, beta.repeat_interleave(total.shape[2] // beta.shape[0], 0), out=log_total
    )
    return free, _or_doubtful(exact, free, beta, shift, span)


def _or_doubtful(exact: Tensor, free: Tensor, beta: Tensor, shift: Shift, span: Range) -> Tensor:
    """`exact` [B, H], and the heads that lose digits to a small temperature or to a top far above F."""
    height = span.top - span.bottom
    # Few looks settle the common case.
    if bool(height.amax() <= FAR_BELOW) and bool(beta.amin() >= SMALL_BETA):
        return exact
    cold = (beta < SMALL_BETA) & (beta * height > NARROW)
    exact |= cold.any(-1)[:, 0].repeat_interleave(free.shape[2] // beta.shape[0], 1)
    return exact | far_below(free, shift.top).any(-1).any(1)


def read_sums(sums: Tensor, beta: Tensor, shift: Shift, span: Range) -> tuple[Tensor, Tensor, Tensor]:
    """From the sums (mu | total - base) [B, T, H, 2D], which are used up, to mu and F [B, T, H, D], their parts, and
    the heads [B, H] for which F is not good to 1e-5."""
    b, t, h, d = *sums.shape[:3], sums.shape[3] // 2
    mean, total = sums.split(d, -1)
    if eager_kernels(sums) and sums.stride(3) == 1:
        doubtful = torch.zeros(b, h, dtype=torch.bool)
        given = *memory(sums, total), (b, t, h, d), *_arrays(beta, shift, span), LIMITS
        native("streams").settle(*given, array(doubtful))
        return mean, total, doubtful
    free, exact = logarithm(total, beta, shift.per_head(h // beta.shape[0]), span)
    # Rounding, or a sum beyond sight, may put F below the mean.
    return mean, torch.maximum(free, mean, out=free), exact


def undo_read(
    to_mean: Tensor, to_free: Tensor, mean: Tensor, free: Tensor, beta: Tensor, shift: Shift, apart: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From mu and F back to the sums (mu | total - base): their gradient, their values, and dbeta of the logarithm.

    total = exp(beta (F - top)), dF/dtotal = 1 / (beta total), dF/dbeta = -(F - top) / beta. Heads that stand `apart`
    [B, H] take no part.
    """
    repeats = free.shape[2] // beta.shape[0]
    if eager_kernels(free):
        b, t, h, d = free.shape
        inner, sums = free.new_empty(2, b, t, h, 2 * d)
        dbeta = free.new_empty(b * native("streams").stretches(t), h, d)
        hidden = _NO_HEADS if apart is None else array(apart.contiguous())
        inputs = (*memory(to_mean, to_free, mean, free), *_arrays(beta, shift), hidden)
        native("streams").undo(*inputs, *map(array, (inner, sums, dbeta)))
        return inner, sums, dbeta.sum(0).unflatten(0, (-1, repeats)).sum(1)
    temperature, shift = (beta if repeats == 1 else beta.repeat_interleave(repeats, 0)), shift.per_head(repeats)
    below_top = free - shift.top
    slope = to_free / temperature
    if apart is not None:
        to_mean, below_top, slope = (x.masked_fill(apart[:, None, :, None], 0) for x in (to_mean, below_top, slope))
    dbeta = -(slope * below_top).sum((0, 1)).unflatten(0, (-1, repeats)).sum(1)
    total = exp_minus(below_top.mul_(temperature), shift.base)
    slope.div_(total if shift.base is None else total + shift.base)
    return torch.cat([to_mean, slope], -1), torch.cat([mean, total], -1), dbeta


def undo_streams(to_streams: Tensor, streams: Tensor, v: Tensor, beta: Tensor, shift: Shift) -> tuple[Tensor, Tensor]:
    """Gradients of v [B, S, G, D] and beta from that of its streams."""
    b, s, groups, d = v.shape
    if eager_kernels(v):
        dv, dbeta = v.new_empty(v.shape), v.new_empty(b * native("streams").stretches(s), groups, d)
        inputs = (*memory(to_streams, streams, v), *_arrays(beta, shift))
        native("streams").through(*inputs, *map(array, (dv, dbeta)))
        return dv, dbeta.sum(0)
    exponentials = streams[..., d:] if shift.base is None else streams[..., d:] + shift.base
    weighted = to_streams[..., d:] * exponentials
    dv = torch.addcmul(to_streams[..., :d], weighted, beta)
    return dv, weighted.mul_(v - shift.top).sum((0, 1))


def _arrays(beta: Tensor, shift: Shift, span: Range | None = None) -> list[Any]:
    """beta [G, D], (bottom,) top and base [B, G, D] as the compiled kernels read them."""
    base = torch.zeros_like(shift.top) if shift.base is None else shift.base
    per_sequence = (shift.top, base) if span is None else (span.bottom, shift.top, base)
    return [array(beta.contiguous()), *(array(x[:, 0].contiguous()) for x in per_sequence)]
