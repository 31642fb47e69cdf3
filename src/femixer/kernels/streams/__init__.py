"""The two streams of a one-pass read, v and exp(beta (v - top)), and the logarithm that turns their sums into F.

In torch here; `numba_cpu` has the same functions as compiled kernels. The softmax read and the decayed linear read are
made of them. Axes: B batch, T queries, S keys, H heads, G key/value heads, D value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Sums below exp(-60) in float32 begin to lose terms to underflow; gradients divide by them.
UNDERFLOW_MARGIN = 27.0
# A channel that spans less than this many nats is read as 1 + sum p (exp - 1): the rounding of p then cancels.
NARROW = 2.0
# Below this temperature a wide channel's logarithm, divided by beta, is not good to 1e-5.
SMALL_BETA = 0.1
# F = top + log(sum) / beta loses digits where F lies this many times its own size (or 1) below top.
FAR_BELOW = 40.0


def transparent(x: Tensor) -> bool:
    """Whether a compiler, a transform of torch.func or a tensor's own class looks through what is done with x: then it
    is made of torch's differentiable operations only."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return type(x) is not Tensor and type(x) is not torch.nn.Parameter


def readable(x: Tensor) -> bool:
    """Whether the numbers of x may decide what is done next: asking a CPU costs nothing, any other device waits."""
    return x.device.type == "cpu" and not transparent(x)


def far_below(free: Tensor, top: Tensor) -> Tensor:
    """Where the difference to `top` has too few digits left to be 1e-5 max(1, |F|)."""
    return top - free > FAR_BELOW * free.abs().clamp_min(1)


class Shift(NamedTuple):
    """How a channel is read: as top + log(base + sum p (exp(beta (v - top)) - base)) / beta; [B, 1, heads, D] each.

    base is 1 in narrow channels and 0 in others.
    """

    top: Tensor
    base: Tensor

    def at(self, groups: slice) -> Shift:
        return Shift(self.top[:, :, groups], self.base[:, :, groups])

    def per_head(self, repeats: int) -> Shift:
        if repeats == 1:
            return self
        return Shift(self.top.repeat_interleave(repeats, 2), self.base.repeat_interleave(repeats, 2))


class Range(NamedTuple):
    """Smallest and largest value of each channel, [B, 1, G, D]."""

    bottom: Tensor
    top: Tensor


def value_range(v: Tensor, beta: Tensor, segments: Tensor | None) -> tuple[Range, Shift]:
    """Of values [B, S, G, D] that are not padding (segments [B, S] negative), and how they are read."""
    v, beta = v.detach(), beta.detach()
    if segments is None:
        span = Range(v.amin(1, keepdim=True), v.amax(1, keepdim=True))
    else:
        padding = (segments < 0)[..., None, None]
        bottom = v.masked_fill(padding, torch.inf).amin(1, keepdim=True)
        top = v.masked_fill(padding, -torch.inf).amax(1, keepdim=True)
        empty = top < bottom
        span = Range(bottom.masked_fill(empty, 0), top.masked_fill(empty, 0))
    return span, Shift(span.top, (beta * (span.top - span.bottom) <= NARROW).to(v.dtype))


def exp_minus(x: Tensor, base: Tensor) -> Tensor:
    """exp(x) - base without cancellation, for a base of 0 or 1 and x <= 0."""
    return torch.lerp(x.exp(), x.expm1(), base)  # the one or the other, to the last bit


def log_plus(x: Tensor, base: Tensor) -> Tensor:
    """log(x + base) without cancellation, for a base of 0 or 1."""
    return torch.where(base > 0, x.log1p(), (x + base).log())


def value_streams(v: Tensor, beta: Tensor | None, shift: Shift | None) -> Tensor:
    """[v, exp(beta (v - top)) - base] of width 2D; v alone without beta."""
    if beta is None or shift is None:
        return v
    # Padding may lie above top: its weight is zero, but its exponential must not overflow.
    exponent = (v - shift.top).clamp(max=0) * beta
    return torch.cat([v, exp_minus(exponent, shift.base)], -1)


def least_log(dtype: torch.dtype) -> float:
    return math.log(torch.finfo(dtype).tiny) + UNDERFLOW_MARGIN


def least_sum(dtype: torch.dtype) -> float:
    """Smaller sums of exponentials may have lost terms."""
    return math.exp(least_log(dtype))


def logarithm(total: Tensor, beta: Tensor, shift: Shift, span: Range) -> tuple[Tensor, Tensor]:
    """F = top + log(total + base) / beta [B, T, H, D], and the heads [B, H] for which that is not good to 1e-5."""
    repeats = total.shape[2] // beta.shape[0]
    doubtful = (total + shift.base < least_sum(total.dtype)).any(-1).any(1)
    free = torch.addcdiv(shift.top, log_plus(total, shift.base), _per_head(beta, repeats))
    height = span.top - span.bottom
    cold = (beta < SMALL_BETA) & (beta * height > NARROW)
    doubtful |= cold.any(-1)[:, 0].repeat_interleave(repeats, 1)
    # One look settles the common case.
    if bool(height.amax() > FAR_BELOW):
        doubtful |= far_below(free, shift.top).any(-1).any(1)
    return free, doubtful


def _per_head(beta: Tensor, repeats: int) -> Tensor:
    return beta if repeats == 1 else beta.repeat_interleave(repeats, 0)


def read_sums(sums: Tensor, beta: Tensor, shift: Shift, span: Range) -> tuple[Tensor, Tensor, Tensor | None]:
    """From the sums (mu | total - base) [B, T, H, 2D] to mu and F [B, T, H, D], and the heads [B, H] for which F is not
    good to 1e-5; None where the sums cannot be looked at: there F is mu where the total has underflowed."""
    mean, total = sums.chunk(2, -1)
    repeats = sums.shape[2] // beta.shape[0]
    shift = shift.per_head(repeats)
    doubtful = None
    if readable(sums):
        free, doubtful = logarithm(total, beta, shift, span)
    else:
        whole = total + shift.base
        lost = whole < least_sum(total.dtype)
        # No logarithm of zero, also where it is not taken: its gradient would be NaN.
        log_total = torch.lerp(whole.masked_fill(lost, 1).log(), total.log1p(), shift.base)
        free = torch.where(lost, mean, torch.addcdiv(shift.top, log_total, _per_head(beta, repeats)))
    # Rounding, or a sum beyond sight, may put F below the mean.
    return mean, torch.maximum(free, mean), doubtful


def undo_read(
    to_mean: Tensor, to_free: Tensor, mean: Tensor, free: Tensor, beta: Tensor, shift: Shift, apart: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From mu and F back to the sums (mu | total - base): their gradient, their values, and dbeta of the logarithm.

    total = exp(beta (F - top)), dF/dtotal = 1 / (beta total), dF/dbeta = -(F - top) / beta. Heads that stand `apart`
    [B, H] take no part. Where the total has underflowed F is mu, and so is its gradient.
    """
    repeats = free.shape[2] // beta.shape[0]
    beta, shift = _per_head(beta, repeats), shift.per_head(repeats)
    below_top = free - shift.top
    slope = to_free / beta
    if apart is not None:
        hidden = apart[:, None, :, None]
        to_mean, below_top, slope = (x.masked_fill(hidden, 0) for x in (to_mean, below_top, slope))
    exponent = below_top * beta
    if not readable(free):
        lost = exponent < least_log(free.dtype)
        to_mean = torch.addcmul(to_mean, to_free, lost)
        slope = slope.masked_fill(lost, 0)
        exponent = exponent.masked_fill(lost, 0)
    dbeta = (slope * below_top).sum((0, 1))
    dbeta = dbeta if repeats == 1 else dbeta.unflatten(0, (-1, repeats)).sum(1)
    whole = exponent.exp()
    total = torch.lerp(whole, exponent.expm1(), shift.base)
    return torch.cat([to_mean, slope / whole], -1), torch.cat([mean, total], -1), -dbeta


def undo_streams(to_streams: Tensor, streams: Tensor, v: Tensor, beta: Tensor, shift: Shift) -> tuple[Tensor, Tensor]:
    """Gradients of v [B, S, G, D] and beta from that of its streams."""
    to_values, to_exponentials = to_streams.chunk(2, -1)
    weighted = to_exponentials * (streams[..., v.shape[3] :] + shift.base)
    return torch.addcmul(to_values, weighted, beta), (weighted * (v - shift.top)).sum((0, 1))
