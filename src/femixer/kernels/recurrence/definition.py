"""The linear recurrence by its definition, token by token in float64."""

from typing import Any

import torch
from torch import Tensor


def forward(decay: Tensor, inputs: Tensor, initial: Tensor, resets: bool) -> tuple[Tensor, ...]:
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
        "one token": (*drawn(1, 1, 3), False),
        "no token": (*drawn(2, 0, 3), False),
    }
