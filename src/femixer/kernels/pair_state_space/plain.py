"""The read over pairs in torch's operations: the modes of all heads are one recurrence over the tokens.

Sums of exponentials are relative to a running shift per head, the largest exponent so far as it decays with the slowest
mode.
"""

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.operator import wide_dtype
from femixer.kernels.reading import last_top, read_of_sums, running_shift, wide
from femixer.kernels.recurrence import linear_recurrence
from femixer.kernels.recurrence.plain import LEAST


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    gate, write, read, spread, gather, values, beta, marks, sums, top, exclusive = arguments
    dtype = wide_dtype(values)
    if values.numel() == 0:
        free = values.new_empty((0, 0, 0, 0) if beta is None else values.shape)
        return values.clone(), free, values.clone(), sums.clone(), top.clone()
    gate, write, read, spread, gather, v = (wide(x) for x in (gate, write, read, spread, gather, values))
    padding = start = None
    if marks is not None:
        padding, start = (x[..., None, None] for x in (is_padding(marks), is_start(marks)))
        gate, v = gate.masked_fill(padding, 0), v.masked_fill(padding, 0)
        write, read = (x.masked_fill(padding[..., 0], 0) for x in (write, read))
    # Streams [B, T, H, N] that are written to the modes, and their log decays.
    streams, decays = [spread.sum(-1).expand_as(gate), _spread(v, spread)], [gate, gate]
    shift = warmth = None
    if beta is not None:
        warmth = wide(beta)[:, None]
        exponent = warmth * v
        shift, before = _shift(exponent, gate, wide(top), padding, start)
        below = exponent - shift
        below = below if padding is None else below.masked_fill(padding, 0)
        streams.append(_spread(below.exp(), spread))
        decays.append(gate + (before - shift))
    x = torch.stack(streams, 2) * write[:, :, None, None]  # [B, T, streams, H, N]
    log_decay = torch.stack(decays, 2)
    if start is not None:
        log_decay = log_decay.masked_fill(start[..., None], -torch.inf)
    initial = wide(sums[:, : len(streams)])
    decay = log_decay.exp()
    h = linear_recurrence(decay.flatten(2), x.flatten(2), initial.flatten(1), resets=start is not None)
    h = h.reshape(x.shape)
    last = h[:, -1].to(sums.dtype)
    if exclusive:
        # A start is read from nothing: its decay is zero.
        h = decay * torch.cat([initial[:, None], h[:, :-1]], 1)
    y = torch.einsum("btshn,btn,hdn->sbthd", h, read, gather)
    results = [x.to(dtype) for x in read_of_sums(y.unbind(0), shift, warmth, padding)]
    if shift is None:
        mean, log_total = results
        last = torch.cat([last, torch.zeros_like(sums[:, 2:])], 1)
        return mean, values.new_empty(0, 0, 0, 0), log_total, last, top.clone()
    return *results, last.clone(), last_top(shift[:, -1, :, 0]).to(top.dtype)


def _spread(x: Tensor, spread: Tensor) -> Tensor:
    """[B, T, H, D] -> [B, T, H, N]"""
    return torch.einsum("bthk,hnk->bthn", x, spread)


def _shift(
    exponent: Tensor, gate: Tensor, top: Tensor, padding: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """At every token, and at the one before [B, T, H, 1]."""
    largest, slowest = (x.detach().amax(-1).mT for x in (exponent, gate))  # [B, H, T]
    marked = (None if x is None else x[..., 0].mT for x in (padding, start))
    shift, first = running_shift(largest, slowest.clamp_min(LEAST), top, *marked)
    before = torch.cat([first, shift[..., :-1]], -1)
    return shift.mT[..., None], before.mT[..., None]
