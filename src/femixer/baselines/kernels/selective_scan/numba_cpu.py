"""The selective scan as one compiled loop over time for a block of channels at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.baselines.kernels.selective_scan import numba_loops as loops
from femixer.baselines.kernels.selective_scan.plain import kept_states
from femixer.kernels.arrays import array
from femixer.kernels.marks import no_marks
from femixer.kernels.operator import filled


def refuse(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> str | None:
    kinds = {part.dtype for part in (rate, step, write, read, x)}
    if len(kinds) > 1 or x.dtype not in (torch.float32, torch.float64):
        return f"it takes float32 or float64 throughout, not {', '.join(sorted(map(str, kinds)))}"
    return None


def forward(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> tuple[Tensor, ...]:
    state = x.new_zeros(x.shape[0], *rate.shape) if state is None else state.to(x.dtype)
    y, last = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(state)
    kept = kept_states(rate, x)
    given = (rate, step, write, read, x, no_marks() if marks is None else marks, state)
    loops.forward(*(array(part.contiguous()) for part in given), *map(array, (y, last, kept)))
    return y, last, kept


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    rate, step, write, read, x, marks, state = arguments
    to_y, to_last, _ = filled(grads, results)
    d_step, d_x = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    d_state = torch.empty_like(to_last)
    d_rate = x.new_empty(x.shape[0], *rate.shape, dtype=torch.float64)
    shares = [x.new_empty(x.shape[0], -(-x.shape[2] // loops.LANES), *write.shape[1:]) for _ in range(2)]
    given = (rate, step, write, read, x, no_marks() if marks is None else marks, results[2], to_y, to_last)
    found = (d_rate, d_step, *shares, d_x, d_state)
    loops.backward(*(array(part.contiguous()) for part in given), *map(array, found))
    d_write, d_read = (share.sum(1) for share in shares)
    to_state = None if state is None else d_state.to(state.dtype)
    return d_rate.sum(0).to(rate.dtype), d_step, d_write, d_read, d_x, None, to_state
