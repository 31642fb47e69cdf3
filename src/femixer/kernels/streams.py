"""The two streams of a one-pass read, v and exp(beta (v - top)), and the logarithm that turns their sum into F.

Axes: B batch, T queries, S keys, H heads, G key/value heads, D value width.
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
LOG2_E = math.log2(math.e)
# F = top + log(sum) / beta loses digits where F lies this many times its own size (or 1) below top.
FAR_BELOW = 40.0


def far_below(free: Tensor, top: Tensor) -> Tensor:
    """Where the difference to `top` has too few digits left to be 1e-5 max(1, |F|)."""
    return top - free > FAR_BELOW * free.abs().clamp_min(1)


class Shift(NamedTuple):
    """How a channel is read: as top + log(base + sum p (exp(beta (v - top)) - base)) / beta; [B, 1, heads, D] each.

    base is 1 in narrow channels and 0 in others, None if it is 0 everywhere.
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


def value_range(v: Tensor, run_k: Tensor | None) -> Range:
    if run_k is None:
        return Range(v.amin(1, keepdim=True), v.amax(1, keepdim=True))
    padding = (run_k < 0)[..., None, None]
    bottom = v.masked_fill(padding, torch.inf).amin(1, keepdim=True)
    top = v.masked_fill(padding, -torch.inf).amax(1, keepdim=True)
    empty = top < bottom
    return Range(bottom.masked_fill(empty, 0), top.masked_fill(empty, 0))


def shift_of(span: Range, beta: Tensor) -> Shift:
    narrow = beta * (span.top - span.bottom) <= NARROW
    return Shift(span.top, narrow.to(span.top.dtype) if bool(narrow.any()) else None)


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
    # Padding may lie above top: its weight is zero, but its exponential must not overflow.
    exponent = (v - shift.top).clamp_(max=0).mul_(beta)
    return torch.cat([v, exp_minus(exponent, shift.base)], -1)


def least_log(dtype: torch.dtype) -> float:
    return math.log(torch.finfo(dtype).tiny) + UNDERFLOW_MARGIN


def logarithm(total: Tensor, beta: Tensor, shift: Shift, span: Range) -> tuple[Tensor, Tensor]:
    """F = top + log(total + base) / beta [B, T, H, D], and the heads [B, H] for which that is not good to 1e-5."""
    repeats = total.shape[2] // beta.shape[0]
    exact = torch.zeros(total.shape[0], total.shape[2], dtype=torch.bool, device=total.device)
    least = math.exp(least_log(total.dtype))
    # The smallest sum settles the common case; a base of 1 only makes sums larger.
    if bool(total.amin() < least):
        exact |= ((total if shift.base is None else total + shift.base) < least).any(-1).any(1)
    log_total = log_plus(total, shift.base)
    free = torch.addcdiv(shift.top, log_total, beta.repeat_interleave(repeats, 0), out=log_total)
    height = span.top - span.bottom
    cold = (beta < SMALL_BETA) & (beta * height > NARROW)
    if bool((cold | (height > FAR_BELOW)).any()):
        exact |= cold.any(-1)[:, 0].repeat_interleave(repeats, 1)
        exact |= far_below(free, shift.top).any(-1).any(1)
    return free, exact
