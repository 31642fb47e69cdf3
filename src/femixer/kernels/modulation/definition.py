"""Modulation by its definition, in float64."""

from typing import Any

import torch
from torch import Tensor


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    x, eta = x.double(), features.double() @ matrix.double().mT
    y = torch.cat([x[..., :scaled] * (1 + eta[..., :scaled]), x[..., scaled:] + eta[..., scaled:]], -1)
    return y.split(widths, -1)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def drawn(tokens: int, widths: list[int], channels: int) -> tuple[Tensor, Tensor, Tensor]:
        width = sum(widths)
        return torch.randn(3, tokens, width), torch.randn(3, tokens, channels), torch.randn(width, channels)

    x, features, matrix = drawn(17, [5, 7], 3)
    features[..., 0], features[..., 1:] = 1, features[..., 1:] * 1e-4
    # One plus eta is zero or close to it: by one feature in every third column, by all of them in another third.
    matrix[::3] = 0
    matrix[::3, 0] = torch.tensor([0, 1e-7, 3e-6, 1e-3]) - 1
    matrix[1::3, 0] = -1
    return {
        "one piece": (*drawn(5, [7], 1), 7, [7]),
        "scaled and added to": (*drawn(347, [3, 7, 5], 4), 10, [3, 7, 5]),
        "added to": (*drawn(3, [5], 8), 0, [5]),
        "many features": (*drawn(89, [3, 7, 5], 11), 10, [3, 7, 5]),
        "one token": (*drawn(1, [5, 3], 5), 5, [5, 3]),
        "no token": (*drawn(0, [5, 3], 5), 5, [5, 3]),
        "factors close to zero": (x, features, matrix, 12, [5, 7]),
    }
