"""What every scan returns, and what the scans written in plain torch share: the running shift of exponentials, and the
read from sums of the streams 1, v and exp(beta v - shift)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Stands for the logarithm of nothing where an infinity would make NaN of a difference.
NOTHING = -1e9
# The same where exponents may be of any size.
LOWEST = -1e37
# A total below this is nothing; gradients divide by its square. In float32 a sum of exponentials below its own is.
TINY, TINY32 = 1e-140, 1e-28
# Devices whose float64 is good for anything. Others have little of it or, as Apple's GPUs, none.
FLOAT64 = ("cpu",)


def state_dtype(device: torch.device) -> torch.dtype:
    """Of what a stream carries on. Sums relative to a running shift need no float64 where there is little of it."""
    return torch.float64 if device.type in FLOAT64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """At least in the type of `state_dtype`."""
    return x.to(torch.promote_types(x.dtype, state_dtype(x.device)))


def is_followed() -> bool:
    """Whether gradients, of whichever mode, a compiler or a transform follow torch's operations: then nothing is done
    in place, and what is made but not used has a finite derivative."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class Reading(NamedTuple):
    """One direction's read [B, T, ...]; the log of its total weight, -inf where nothing is seen (anything at padding),
    of the same shape or without the channels; and the scan's state after the last token."""

    mean: Tensor
    free: Tensor | None
    log_total: Tensor
    state: Any


def running_shift(
    exponent: Tensor, slowest: Tensor, top: Tensor, padding: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """shift_t = max(exponent_t, shift_{t-1} + slowest_t) along the last dim, and the shift before the first token.

    exponent, slowest (the log decay of what decays slowest) [..., T]; top [...] of the state, -inf if there is none;
    padding and start bool, broadcast to [..., T]. Where nothing is seen yet the shift is lower than any exponent.
    """
    exponent, slowest = exponent.detach(), slowest.detach().expand_as(exponent)
    first = top.detach().clamp_min(LOWEST)[..., None]
    if padding is not None and start is not None:
        # A start leaves what came before below anything that follows.
        known = torch.where(first > LOWEST, first, 0).abs()
        least = -4 * torch.maximum(exponent.abs().amax(-1, keepdim=True), known) - 1e3
        slowest = torch.where(start, least, slowest)
        exponent = exponent.masked_fill(padding, LOWEST)
    reach = slowest.cumsum(-1)
    return torch.cat([first, exponent - reach], -1).cummax(-1).values[..., 1:] + reach, first


def last_top(shift: Tensor) -> Tensor:
    """The state's top from the shift at the last token: -inf if nothing was seen."""
    return shift.masked_fill(shift <= LOWEST / 2, -torch.inf)


def read_of_sums(
    sums: tuple[Tensor, ...], shift: Tensor | None, beta: Tensor | None, padding: Tensor | None
) -> tuple[Tensor, ...]:
    """Mean, with a beta also free energy, and log total, zero at padding, from sums of 1, v and exp(beta v - shift).

    Written as `<=` so that NaN propagates.
    """
    nothing = sums[0] <= TINY
    total = sums[0].masked_fill(nothing, 1)
    mean, log_total = sums[1] / total, total.log().masked_fill(nothing, -torch.inf)
    if padding is not None:
        mean, log_total = mean.masked_fill(padding, 0), log_total.masked_fill(padding, 0)
    if shift is None or beta is None:
        return mean, log_total
    ratio = sums[2] / total
    unseen = ratio <= (TINY if ratio.dtype == torch.float64 else TINY32)
    if padding is not None:
        unseen = unseen | padding
    value = (shift + ratio.masked_fill(unseen, 1).log()) / beta
    return mean, torch.where(unseen, mean, torch.maximum(value, mean)), log_total


class Inverses(NamedTuple):
    """One over the sums of 1 (zero where that is nothing) and of exp(beta v - shift) (anything where it is)."""

    total: Tensor
    exponentials: Tensor | None


def undo_read_of_sums(
    grads: tuple[Tensor | None, ...], mean: Tensor, free: Tensor, at_mean: Tensor, one_over: Inverses, beta: Any
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of the sums of 1, v and exp(beta v - shift), from those of mean, free energy and log total, and what
    adds up to minus the gradient of beta. at_mean: where the free energy is the mean.

    All tensors are of one shape, but for beta; that of one over the exponentials is overwritten. What is zero at
    padding is left to the caller.
    """
    to_mean = torch.zeros_like(mean) if grads[0] is None else grads[0].to(mean.dtype)
    parts, to_beta, falls = [], None, None
    if one_over.exponentials is not None:
        to_free = torch.zeros_like(mean) if grads[1] is None else grads[1].to(mean.dtype)
        slope = (to_free / beta).masked_fill(at_mean, 0)
        to_mean = torch.addcmul(to_mean, to_free, at_mean)
        parts, to_beta = [one_over.exponentials.masked_fill_(at_mean, 0).mul_(slope)], slope * free
        falls = slope.addcmul_(to_mean, mean)
    falls = to_mean * mean if falls is None else falls
    to_total = falls.neg_() if grads[2] is None else grads[2].to(mean.dtype) - falls
    return [to_total.mul_(one_over.total), to_mean * one_over.total, *parts], to_beta
