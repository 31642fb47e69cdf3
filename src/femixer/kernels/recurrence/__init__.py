"""The elementwise linear recurrence h_t = decay_t * h_{t-1} + input_t along time."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import Operator


def _results(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
    return (torch.empty_like(inputs, memory_format=torch.contiguous_format),)


OPERATOR = Operator(__name__, _results)


def linear_recurrence(decay: Tensor, inputs: Tensor, initial: Tensor, *, resets: bool = True) -> Tensor:
    """h [B, T, C] with h_0 = decay_0 * initial + inputs_0; decay in [0, 1] and inputs [B, T, C], initial [B, C].

    No quotient and no exponential of a sum over the whole sequence is formed, so it is exact at any length. resets: a
    decay may be zero, and then exactly nothing is left of the past.
    """
    if inputs.shape[1] == 1:
        return torch.addcmul(inputs, decay, initial[:, None])
    return OPERATOR(decay, inputs, initial, resets)[0]
