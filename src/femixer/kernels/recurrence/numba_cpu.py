"""The linear recurrence as one compiled loop over time for a block of channels at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.arrays import array
from femixer.kernels.recurrence import numba_loops as loops


def refuse(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> str | None:
    kinds = {decay.dtype, inputs.dtype, initial.dtype}
    if len(kinds) > 1 or inputs.dtype not in (torch.float32, torch.float64):
        return f"it takes float32 or float64 throughout, not {', '.join(sorted(map(str, kinds)))}"
    return None


def forward(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
    h = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    loops.forward(*(array(x.contiguous()) for x in (decay, inputs, initial)), array(h))
    return (h,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor, Tensor, bool],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    decay, _, initial = (x.contiguous() for x in arguments[:3])
    gradients = torch.empty_like(decay), torch.empty_like(decay), torch.empty_like(initial)
    given = (grads[0].contiguous(), decay, results[0], initial)
    loops.backward(*map(array, (*given, *gradients)))
    return gradients
