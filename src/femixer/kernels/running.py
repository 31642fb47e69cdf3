"""Running read of a prior with one weight per token and channel: mean, free energy and log of the total weight.

    weight of token i at t:  exp(key_i + gate_{i+1} + ... + gate_t),   gate <= 0

Everything is in log space, so keys and gates may have any size. Axes: B batch, T tokens, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.backend import array, compiled, native, or_empty
from femixer.kernels.precision import without_autocast
from femixer.kernels.reading import NOTHING, Reading
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import PADDING, START


def empty_state(v: Tensor) -> Tensor:
    state = v.new_zeros(3, v.shape[0], v.shape[2], dtype=torch.float64)
    state[0] = -torch.inf
    return state


def running_read(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor,
    exclusive: bool = False,
) -> Reading:
    """key, gate, v [B, T, C]; beta [C]; marks [B, T] (see femixer.layout); state [3, B, C] of the tokens before.

    exclusive: every row reads the tokens before it, decayed by its own gate; where there is none its total is empty.
    """
    with without_autocast(v.device):
        if not compiled(v):
            read = _plain(key, gate, v, beta, marks, state)
        else:
            key, gate = (None if x is None else x.contiguous() for x in (key, gate))
            mean, free, log_total, last = _read(key, gate, v.contiguous(), beta, marks, state.contiguous())
            read = Reading(mean, None if beta is None else free, log_total, last)
        return _without_itself(read, gate, marks) if exclusive else read


def _without_itself(read: Reading, gate: Tensor | None, marks: Tensor | None) -> Reading:
    """The results of the row before, in the same segment; a scan from the beginning."""
    batch, length, width = read.mean.shape
    index = torch.arange(length, device=read.mean.device).expand(batch, -1)
    if marks is None:
        before = index - 1
    else:
        real = index.masked_fill(marks == PADDING, -1).cummax(1).values
        before = torch.cat([torch.full_like(real[:, :1], -1), real[:, :-1]], 1)
        before = before.masked_fill(marks == START, -1)
    nothing = (before < 0)[..., None]
    take = before.clamp(min=0)[..., None].expand(-1, -1, width)
    mean, free, log_total = (None if x is None else x.gather(1, take) for x in read[:3])
    assert mean is not None
    assert log_total is not None
    log_total = (log_total if gate is None else log_total + gate).masked_fill(nothing, -torch.inf)
    return Reading(mean.masked_fill(nothing, 0), free, log_total, read.state)


def _plain(
    key: Tensor | None, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None, state: Tensor
) -> Reading:
    """The same in plain torch: sums in float64, relative to the largest term so far."""
    x = v.double()
    k = torch.zeros_like(x) if key is None else key.double()
    g = torch.zeros_like(x) if gate is None else gate.double()
    real = torch.ones_like(x[..., :1])
    if marks is not None:
        padding, start = (marks == PADDING)[..., None], (marks == START)[..., None]
        g = g.masked_fill(padding, 0).masked_fill(start, 10 * NOTHING)
        k, x, real = k.masked_fill(padding, NOTHING), x.masked_fill(padding, 0), real.masked_fill(padding, 0)
    before, known = state[0], state[0] > -torch.inf
    before = torch.where(known, before, 0)

    def sums(log_term: Tensor, log_before: Tensor, *streams: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """sum_i exp(log_term_i + gates) x_i for each (x, x before), relative to exp(shift) which is returned first."""
        first = torch.where(known, log_before, NOTHING).detach()[:, None]
        reach = g.detach().cumsum(1)
        shift = (torch.cat([first, log_term.detach() - reach], 1).cummax(1).values)[:, 1:] + reach
        shift = torch.maximum(shift, first.new_full((), 2 * NOTHING))
        decay = (g + torch.cat([first, shift[:, :-1]], 1) - shift).exp()
        term = (log_term - shift).exp() * real
        initial = torch.where(known, torch.where(known, log_before - first[:, 0], 0).exp(), 0)
        return shift, [linear_recurrence(decay, term * here, initial * there) for here, there in streams]

    ones = torch.ones_like(x)
    shift, (total, weighted) = sums(k, before, (ones, ones[:, 0] if ones.shape[1] else state[1]), (x, state[1]))
    there = real > 0 if marks is not None else total > 0
    total = torch.where(there, total, 1)
    mean = torch.where(there, weighted / total, 0)
    log_total = torch.where(there, shift + total.log(), 0)
    free = None
    if beta is not None:
        b = beta.double()
        top, (energy,) = sums(k + b * x, before + b * state[2], (ones, torch.ones_like(before)))
        energy = torch.where(there, energy, 1)
        free = torch.where(there, torch.maximum((top - shift + (energy / total).log()) / b, mean), 0)
    # The last real token's results, or what was before if there is none.
    rows = [log_total, mean, torch.zeros_like(mean) if free is None else free]
    last = torch.stack([torch.cat([state[i][:, None], rows[i]], 1) for i in range(3)])
    index = torch.full((v.shape[0],), v.shape[1], device=v.device)
    if marks is not None:
        count = torch.arange(1, v.shape[1] + 1, device=v.device).expand_as(marks).masked_fill(marks == PADDING, 0)
        index = torch.cat([torch.zeros_like(count[:, :1]), count], 1).amax(1) if v.shape[1] else index * 0
    last = last[:, torch.arange(v.shape[0], device=v.device), index]
    return Reading(mean.to(v.dtype), None if free is None else free.to(v.dtype), log_total.to(v.dtype), last)


def _complete(
    key: Tensor | None, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None, state: Tensor
) -> tuple[Tensor, ...]:
    """Empty tensors for what is not there."""
    key, gate = (v.new_empty(0, 0, 0) if x is None else x for x in (key, gate))
    beta = v.new_empty(0) if beta is None else beta
    marks = or_empty(marks)
    return key, gate, v, beta.contiguous(), marks, state


@torch.library.custom_op("femixer::running_read", mutates_args=())
def _read(
    key: Tensor | None, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, log_total, last = torch.empty_like(v), torch.empty_like(v), torch.zeros_like(state)
    free = v.new_empty(0, 0, 0) if beta is None else torch.empty_like(v)
    arguments = _complete(key, gate, v, beta, marks, state)
    native("running").forward(*map(array, (*arguments, mean, free, log_total, last)))
    return mean, free, log_total, last


@_read.register_fake
def _(
    key: Tensor | None, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    free = v.new_empty(0, 0, 0) if beta is None else torch.empty_like(v)
    return torch.empty_like(v), free, torch.empty_like(v), torch.empty_like(state)


@torch.library.custom_op("femixer::running_read_backward", mutates_args=())
def _read_backward(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    to_last: Tensor,
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor,
    mean: Tensor,
    free: Tensor,
    log_total: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_key, d_gate = (v.new_empty((0, 0, 0) if x is None else v.shape) for x in (key, gate))
    d_v, d_state = torch.empty_like(v), torch.zeros_like(state)
    d_beta = torch.zeros_like(state[0])
    arguments = (*_complete(key, gate, v, beta, marks, state), mean, free, log_total)
    gradients = (to_mean, v.new_empty(0, 0, 0) if to_free is None else to_free, to_log, to_last)
    native("running").backward(*map(array, (*arguments, *gradients, d_key, d_gate, d_v, d_beta, d_state)))
    return d_key, d_gate, d_v, v.new_empty(0) if beta is None else d_beta.sum(0).to(beta.dtype), d_state


@_read_backward.register_fake
def _(
    to_mean: Tensor,
    to_free: Tensor | None,
    to_log: Tensor,
    to_last: Tensor,
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_key, d_gate = (v.new_empty((0, 0, 0) if x is None else v.shape) for x in (key, gate))
    d_beta = v.new_empty(0) if beta is None else torch.empty_like(beta)
    return d_key, d_gate, torch.empty_like(v), d_beta, torch.empty_like(state)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output[:3])


def _backward(ctx, to_mean, to_free, to_log, to_last):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    key, gate, _, beta = saved[:4]
    to_free = None if beta is None else to_free.contiguous()
    d_key, d_gate, d_v, d_beta, d_state = _read_backward(
        to_mean.contiguous(), to_free, to_log.contiguous(), to_last.contiguous(), *saved
    )
    return (
        None if key is None else d_key,
        None if gate is None else d_gate,
        d_v,
        None if beta is None else d_beta,
        None,
        d_state,
    )


_read.register_autograd(_backward, setup_context=_setup)
