"""The scan per channel as one compiled loop over time for a block of channels at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.arrays import array
from femixer.kernels.channel_scan import numba_loops as loops
from femixer.kernels.marks import no_marks
from femixer.kernels.operator import filled

Arguments = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


def refuse(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> str | None:
    kinds = {x.dtype for x in (key, gate, v, beta) if x is not None}
    if len(kinds) > 1 or v.dtype not in (torch.float32, torch.float64):
        return f"it takes float32 or float64 throughout, not {', '.join(sorted(map(str, kinds)))}"
    return None


def _complete(arguments: Arguments) -> list[Tensor]:
    """The arguments, contiguous, with empty tensors for what is not there and the state of no token."""
    key, gate, v, beta, marks, state = arguments
    if state is None:
        state = v.new_zeros(3, v.shape[0], v.shape[2], dtype=torch.float64)
        state[0] = -torch.inf
    key, gate = (v.new_empty(0, 0, 0) if x is None else x for x in (key, gate))
    given = key, gate, v, v.new_empty(0) if beta is None else beta, no_marks() if marks is None else marks, state
    return [x.contiguous() for x in given]


def _like(v: Tensor, x: Tensor | None) -> Tensor:
    return v.new_empty(0, 0, 0) if x is None else torch.empty_like(v)


def forward(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    given = _complete((key, gate, v, beta, marks, state))
    v = given[2]
    mean, free, log_total, last = torch.empty_like(v), _like(v, beta), torch.empty_like(v), torch.zeros_like(given[5])
    loops.forward(*map(array, (*given, mean, free, log_total, last)))
    return mean, free.flatten() if beta is None else free, log_total, last, v.new_empty(0)


def backward(
    grads: tuple[Tensor | None, ...], arguments: Arguments, results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    key, gate, _, beta, _, state = arguments
    given = _complete(arguments)
    v = given[2]
    to_mean, to_free, to_log, to_last = filled(grads[:4], results)
    mean, free, log_total = results[:3]
    if beta is None:
        free, to_free = _like(v, None), _like(v, None)
    d_key, d_gate, d_v, d_state = _like(v, key), _like(v, gate), torch.empty_like(v), torch.zeros_like(given[5])
    d_beta = torch.zeros_like(d_state[0])
    saved = (mean, free, log_total, to_mean, to_free, to_log, to_last)
    loops.backward(*map(array, (*given, *saved, d_key, d_gate, d_v, d_beta, d_state)))
    return (
        None if key is None else d_key,
        None if gate is None else d_gate,
        d_v,
        None if beta is None else d_beta.sum(0).to(beta.dtype),
        None,
        None if state is None else d_state,
    )
