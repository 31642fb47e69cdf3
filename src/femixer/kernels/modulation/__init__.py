"""Modulation of projections x by the conditioner's features: x * (1 + eta) or x + eta, with eta = features Mᵀ.

A factor 1 + eta below half the eps of its type, which is how well it is known where eta is close to -1, counts as that.
So x is y / (1 + eta) again, and of x and the results y only y is kept for the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import declared


# The internal result is all columns as one tensor, of which the others are parts.
@declared(outputs=None, internal=1, fusible=True)
def modulation(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    """x [..., W], features [..., C], matrix [W, C] -> y [..., width] for each of the widths, whose sum is W.

    The first `scaled` columns are multiplied by 1 + eta, to the others eta is added; `scaled` is the sum of some of the
    first widths.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return *(y.new_empty(*y.shape[:-1], width) for width in widths), y


OPERATOR = modulation.operator


def definition(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    """The formula in float64."""
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
