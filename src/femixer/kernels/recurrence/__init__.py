"""The elementwise linear recurrence h_t = decay_t * h_{t-1} + input_t along time."""

from __future__ import annotations

from typing import Any

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


def definition(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
    """Token by token in float64."""
    h, rows = initial.double(), []
    for a, u in zip(decay.double().unbind(1), inputs.double().unbind(1), strict=True):
        h = a * h + u
        rows.append(h)
    return (torch.stack(rows, 1) if rows else inputs.double(),)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def drawn(batch: int, length: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.rand(batch, length, channels), torch.randn(batch, length, channels), torch.randn(batch, channels)

    decay, inputs, initial = drawn(2, 293, 5)
    wiped = decay * (torch.rand(decay.shape) > 0.1)
    return {
        "long": (decay**0.01, inputs, initial, False),
        "strong and weak decays": (decay**20, inputs, initial, False),
        "decays of zero and one": (wiped.round(), inputs, initial, True),
        "resets": (wiped, inputs, initial, True),
        "two tokens": (*drawn(3, 2, 7), False),
        "transposed": (torch.rand(3, 17, 2).mT, torch.randn(17, 3, 2).permute(1, 2, 0), torch.randn(3, 17), True),
        "one token": (*drawn(1, 1, 3), False),
        "no token": (*drawn(2, 0, 3), False),
    }
