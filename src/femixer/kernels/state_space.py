"""Diagonal state spaces with positive weights: mean, free energy and log of the total weight, per channel.

    weight of token i at t:  sum_n read_t[n] exp(rate[n] (step_{i+1} + ... + step_t)) write_i[n] step_i,   rate <= 0

step, write and read are input-dependent (Mamba), or step and write are 1 and the read is one `weight` per mode and
channel (a time-invariant state space). With `skip` a token reads itself with that weight instead of through the state.

Axes: B batch, T tokens, C channels, N modes per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.backend import array, compiled, native, or_empty
from femixer.kernels.reading import NOTHING, TINY, Reading
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import PADDING, START

BLOCK = 128  # tokens whose modes the plain path holds at a time


class Modes(NamedTuple):
    """State: sums [B, 3, N, C] of 1, v and exp(beta v - top) per mode, and top [B, C], float64."""

    sums: Tensor
    top: Tensor

    @classmethod
    def empty(cls, rate: Tensor, v: Tensor) -> Modes:
        sums = v.new_zeros(v.shape[0], 3, *rate.shape, dtype=torch.float64)
        return cls(sums, v.new_full((v.shape[0], v.shape[2]), -torch.inf, dtype=torch.float64))


class System(NamedTuple):
    """rate [N, C] log decays; step [B, T, C]; write [B, T, N]; read [B, T, N] or weight [N, C]; skip [C]."""

    rate: Tensor
    step: Tensor | None = None
    write: Tensor | None = None
    read: Tensor | None = None
    weight: Tensor | None = None
    skip: Tensor | None = None


def state_space_read(
    system: System,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Modes,
    exclusive: bool = False,
) -> Reading:
    """v [B, T, C]; beta [C]; marks [B, T]. exclusive: a token reads those before it, decayed by its own step."""
    if not compiled(v):
        return _plain(system, v, beta, marks, state, exclusive)
    whole = [None if x is None else x.contiguous() for x in system]
    beta, marks = (None if x is None else x.contiguous() for x in (beta, marks))
    sums, top = (x.contiguous() for x in state)
    mean, free, log_total, *last = _read(*whole, v.contiguous(), beta, marks, sums, top, exclusive)
    return Reading(mean, None if beta is None else free, log_total, Modes(*last))


def _plain(
    system: System, v: Tensor, beta: Tensor | None, marks: Tensor | None, state: Modes, exclusive: bool
) -> Reading:
    """The same in plain torch, in float64, some tokens at a time."""
    results = []
    for start in range(0, v.shape[1], BLOCK):
        at = slice(start, start + BLOCK)
        here = system._replace(
            **{name: x[:, at] for name, x in system._asdict().items() if x is not None and x.dim() == 3}
        )
        mark = None if marks is None else marks[:, at]
        *read, state = _block(here, v[:, at].double(), None if beta is None else beta.double(), mark, state, exclusive)
        results.append(read)
    mean, free, log_total = (torch.cat(parts, 1).to(v.dtype) for parts in zip(*results, strict=True))
    return Reading(mean, None if beta is None else free, log_total, state)


def _block(
    system: System, v: Tensor, beta: Tensor | None, marks: Tensor | None, state: Modes, exclusive: bool
) -> tuple[Tensor, Tensor, Tensor, Modes]:
    rate, step, write, read, weight, skip = (None if x is None else x.double() for x in system)
    assert rate is not None
    sums, top = state
    d = torch.ones_like(v) if step is None else step
    amount = d[:, :, None] if write is None else d[:, :, None] * write[..., None]  # [B, T, N or 1, C]
    gates = d[:, :, None] * rate
    start = torch.zeros_like(v[..., :1], dtype=torch.bool)
    if marks is not None:
        padding, start = (marks == PADDING)[..., None], (marks == START)[..., None]
        gates, amount = gates.masked_fill(padding[..., None], 0), amount.masked_fill(padding[..., None], 0)
        v = v.masked_fill(padding, 0)

    def sweep(decay: Tensor, inputs: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """States after each token's decay, and after it was written too."""
        inputs = inputs.expand_as(decay)
        written = linear_recurrence(decay.flatten(2), inputs.flatten(2), initial.flatten(1)).unflatten(2, rate.shape)
        return decay * torch.cat([initial[:, None], written[:, :-1]], 1), written

    def look(decayed: Tensor, written: Tensor, x: Tensor) -> Tensor:
        h = decayed if exclusive or skip is not None else written
        if read is not None:
            y = (h * read[..., None]).sum(2)
        else:
            assert weight is not None
            y = (h * weight).sum(2)
        return y if exclusive or skip is None else y + skip * x

    ones = torch.ones_like(v)
    decay = gates.masked_fill(start[..., None], -torch.inf).exp()
    swept = [sweep(decay, amount * x[:, :, None], sums[:, j]) for j, x in enumerate((ones, v))]
    total, weighted = (look(*states, x) for states, x in zip(swept, (ones, v), strict=True))
    there = total > TINY
    if marks is not None:
        there = there & (marks != PADDING)[..., None]
    safe = torch.where(there, total, 1)
    mean, log_total = torch.where(there, weighted / safe, 0), torch.where(there, safe.log(), -torch.inf)
    free, last = torch.zeros_like(mean), [written[:, -1] for _, written in swept]
    if beta is None:
        return mean, free, log_total, Modes(torch.stack([*last, sums[:, 2]], 1), top)
    # The exponentials relative to the largest exponent so far, which decays with the slowest mode.
    slowest = gates.detach().amax(2).masked_fill(start, 10 * NOTHING)
    exponent = beta * v
    reach = slowest.cumsum(1)
    fresh = exponent.detach() if marks is None else exponent.detach().masked_fill(marks[..., None] == PADDING, NOTHING)
    first = torch.where(top > -torch.inf, top, NOTHING)[:, None]
    shift = torch.cat([first, fresh - reach], 1).cummax(1).values[:, 1:] + reach
    before = torch.cat([first, shift[:, :-1]], 1)
    decay = (gates + (before - shift)[:, :, None]).masked_fill(start[..., None], -torch.inf).exp()
    x = (
        (exponent - shift).exp()
        if marks is None
        else (exponent - shift).masked_fill(marks[..., None] == PADDING, 0).exp()
    )
    states = sweep(decay, amount * x[:, :, None], sums[:, 2])
    ratio = look(*states, x) / safe
    seen = there & (ratio > 0)
    value = (shift + torch.where(seen, ratio, 1).log()) / beta
    free = torch.where(seen, torch.maximum(value, mean), mean)
    nothing = shift[:, -1] < NOTHING / 2
    return (
        mean,
        free,
        log_total,
        Modes(torch.stack([*last, states[1][:, -1]], 1), shift[:, -1].masked_fill(nothing, -torch.inf)),
    )


def _complete(like: Tensor, *tensors: Tensor | None, dims: tuple[int, ...]) -> list[Tensor]:
    """Empty tensors of so many dims for what is not there."""
    return [like.new_empty((0,) * n) if x is None else x for x, n in zip(tensors, dims, strict=True)]


def _arguments(
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
) -> list[Tensor]:
    system = _complete(v, step, write, read, weight, skip, dims=(3, 3, 3, 2, 1))
    marks = or_empty(marks)
    return [rate, *system, v, *_complete(v, beta, dims=(1,)), marks, sums, top]


@torch.library.custom_op("femixer::state_space_read", mutates_args=())
def _read(
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mean, log_total = torch.empty_like(v), torch.empty_like(v)
    free = v.new_empty(0, 0, 0) if beta is None else torch.empty_like(v)
    last, last_top = torch.empty_like(sums), torch.empty_like(top)
    arguments = _arguments(rate, step, write, read, weight, skip, v, beta, marks, sums, top)
    results = (mean, free, log_total, last, last_top)
    native("state_space").forward(*map(array, arguments), exclusive, *map(array, results))
    return mean, free, log_total, last, last_top


@_read.register_fake
def _(
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    free = v.new_empty(0, 0, 0) if beta is None else torch.empty_like(v)
    return torch.empty_like(v), free, torch.empty_like(v), torch.empty_like(sums), torch.empty_like(top)


@torch.library.custom_op("femixer::state_space_read_backward", mutates_args=())
def _read_backward(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    to_last: Tensor,
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    lanes = native("state_space").LANES
    batch, length, width = v.shape
    modes, blocks = rate.shape[0], -(-width // lanes)
    nothing = v.new_empty(0, 0, 0)
    d_v, d_sums = torch.empty_like(v), torch.empty_like(sums)
    d_step = nothing if step is None else torch.empty_like(v)
    parts = [v.new_empty((0,) * 4 if x is None else (batch, blocks, length, modes)) for x in (write, read)]
    per_mode = [top.new_zeros(batch, modes, width) for _ in range(2)]
    per_channel = [torch.zeros_like(top) for _ in range(2)]
    arguments = _arguments(rate, step, write, read, weight, skip, v, beta, marks, sums, top)
    gradients = (to_mean, nothing if to_free is None else to_free, to_log, to_last)
    results = (per_mode[0], d_step, *parts, per_mode[1], per_channel[0], d_v, per_channel[1], d_sums)
    native("state_space").backward(*map(array, arguments), exclusive, *map(array, (*gradients, *results)))
    d_write, d_read = (part.sum(1) for part in parts)
    d_rate, d_weight, d_skip, d_beta = (x.sum(0).to(v.dtype) for x in (*per_mode, *per_channel))
    return d_rate, d_step, d_write, d_read, d_weight, d_skip, d_v, d_beta, d_sums


@_read_backward.register_fake
def _(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    to_last: Tensor,
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    *rest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_step = v.new_empty(0, 0, 0) if step is None else torch.empty_like(v)
    shape = (v.shape[0], v.shape[1], rate.shape[0])
    d_write, d_read = (v.new_empty((0,) * 3 if x is None else shape) for x in (write, read))
    d_channel = v.new_empty(v.shape[2])
    d_rate, d_weight = v.new_empty(rate.shape), v.new_empty(rate.shape)
    sums = rest[2]
    return (
        d_rate,
        d_step,
        d_write,
        d_read,
        d_weight,
        d_channel,
        torch.empty_like(v),
        torch.empty_like(d_channel),
        torch.empty_like(sums),
    )


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.exclusive = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(output[4])


def _backward(ctx, to_mean, to_free, to_log, to_last, _):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    beta = saved[7]
    to_free = None if beta is None else to_free.contiguous()
    *grads, d_v, d_beta, d_sums = _read_backward(
        to_mean.contiguous(), to_free, to_log.contiguous(), to_last.contiguous(), *saved, ctx.exclusive
    )
    system = [None if given is None else grad for given, grad in zip(saved[:6], grads, strict=True)]
    return *system, d_v, None if beta is None else d_beta, None, d_sums, None, None


_read.register_autograd(_backward, setup_context=_setup)
