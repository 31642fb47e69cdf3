"""The read over pairs in torch's operations: the modes of all heads are one recurrence over the tokens.

Sums of exponentials are relative to a running shift per head, the largest exponent so far as it decays with the slowest
mode.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.operator import wide_dtype
from femixer.kernels.reading import TINY, Inverses, last_top, read_of_sums, running_shift, undo_read_of_sums, wide
from femixer.kernels.recurrence import linear_recurrence
from femixer.kernels.recurrence.plain import LEAST


class Sums(NamedTuple):
    """Of the streams 1, v and exp(beta v - shift): what rows read y [S, B, T, H, D] and the modes after the last token
    [B, S, H, N]; shift [B, T, H, 1], beta [H, 1] and padding [B, T, 1, 1] where there are any."""

    y: Tensor
    last: Tensor
    shift: Tensor | None
    beta: Tensor | None
    padding: Tensor | None


def _sums(arguments: tuple[Any, ...]) -> Sums:
    gate, write, read, spread, gather, v = (wide(x) for x in arguments[:6])
    beta, marks, sums, top, exclusive = arguments[6:]
    padding = start = None
    if marks is not None:
        padding, start = (x[..., None, None] for x in (is_padding(marks), is_start(marks)))
        gate, v = gate.masked_fill(padding, 0), v.masked_fill(padding, 0)
        write, read = (x.masked_fill(padding[..., 0], 0) for x in (write, read))
    # Streams [B, T, H, N] that are written to the modes, and their log decays.
    spreading, decays = "bthk,hnk->bthn", [gate, gate]
    streams = [spread.sum(-1).expand_as(gate), torch.einsum(spreading, v, spread)]
    shift = warmth = None
    if beta is not None:
        warmth = wide(beta)[:, None]
        exponent = warmth * v
        shift, before = _shift(exponent, gate, wide(top), padding, start)
        below = exponent - shift
        below = below if padding is None else below.masked_fill(padding, 0)
        streams.append(torch.einsum(spreading, below.exp(), spread))
        decays.append(gate + (before - shift))
    x = torch.stack(streams, 2) * write[:, :, None, None]  # [B, T, streams, H, N]
    log_decay = torch.stack(decays, 2)
    if start is not None:
        log_decay = log_decay.masked_fill(start[..., None], -torch.inf)
    initial = wide(sums[:, : len(streams)])
    decay = log_decay.exp()
    h = linear_recurrence(decay.flatten(2), x.flatten(2), initial.flatten(1), resets=start is not None)
    h = h.reshape(x.shape)
    last = h[:, -1]
    if exclusive:
        # A start is read from nothing: its decay is zero.
        h = decay * torch.cat([initial[:, None], h[:, :-1]], 1)
    return Sums(torch.einsum("btshn,btn,hdn->sbthd", h, read, gather), last, shift, warmth, padding)


READS_RESULTS = slice(0, 2)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    values, beta, _, sums, top, _ = arguments[5:]
    if values.numel() == 0:
        free = values.new_empty((0, 0, 0, 0) if beta is None else values.shape)
        return values.clone(), free, values.clone(), sums.clone(), top.clone()
    y, last, shift, warmth, padding = _sums(arguments)
    results = [x.to(wide_dtype(values)) for x in read_of_sums(y.unbind(0), shift, warmth, padding)]
    if shift is None:
        mean, log_total = results
        last = torch.cat([last.to(sums.dtype), torch.zeros_like(sums[:, 2:])], 1)
        return mean, values.new_empty(0, 0, 0, 0), log_total, last, top.clone()
    return *results, last.to(sums.dtype, copy=True), last_top(shift[:, -1, :, 0]).to(top.dtype)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """That of the read is written out, the sums are computed again with gradients."""
    if arguments[5].numel() == 0:
        return *(torch.zeros_like(x) if isinstance(x, Tensor) else None for x in arguments[:8]), grads[3], None
    with torch.enable_grad():
        again = [
            x.detach().requires_grad_(need) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x, need in zip(arguments, needed, strict=True)
        ]
        made = _sums(tuple(again))
        with torch.no_grad():
            total, value, *rest = made.y.detach().unbind()
            inverse = total.reciprocal().masked_fill(total <= TINY, 0)
            one_over = Inverses(inverse, rest[0].reciprocal() if rest else None)
            mean, beta = value * inverse, None if made.beta is None else made.beta.detach()
            at_mean = results[1] <= results[0] if rest else inverse
            to_sums, to_beta = undo_read_of_sums(grads[:3], mean, wide(results[1]), at_mean, one_over, beta)
            to_y = torch.stack(to_sums)
            del to_sums, one_over, inverse, mean, value, total, rest
            if made.padding is not None:
                to_y = to_y.masked_fill(made.padding, 0)
        ends, by = [made.y], [to_y]
        if grads[3] is not None:
            ends.append(made.last)
            by.append(wide(grads[3][:, : made.last.shape[1]]))
        leaves = [x for x in again if isinstance(x, Tensor) and x.requires_grad]
        del made, to_y
        used = [(y, g) for y, g in zip(ends, by, strict=True) if y.requires_grad]
        del ends, by
        found = iter(torch.autograd.grad([y for y, _ in used], leaves, [g for _, g in used], allow_unused=True))
    given = [next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in again[:-1]]
    if to_beta is not None and needed[6]:
        direct = to_beta.sum((0, 1, 3)).to(arguments[6].dtype)
        given[6] = -direct if given[6] is None else given[6] - direct
    return tuple(given)


def _shift(
    exponent: Tensor, gate: Tensor, top: Tensor, padding: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """At every token, and at the one before [B, T, H, 1]."""
    largest, slowest = (x.detach().amax(-1).mT for x in (exponent, gate))  # [B, H, T]
    marked = (None if x is None else x[..., 0].mT for x in (padding, start))
    shift, first = running_shift(largest, slowest.clamp_min(LEAST), top, *marked)
    before = torch.cat([first, shift[..., :-1]], -1)
    return shift.mT[..., None], before.mT[..., None]
