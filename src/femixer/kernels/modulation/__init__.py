"""Modulation of projections x by the conditioner's features: x * (1 + eta) or x + eta, with eta = features Mᵀ.

A factor 1 + eta below half the eps of its type, which is how well it is known where eta is close to -1, counts as that.
So x is y / (1 + eta) again, and of x and the results y only y is kept for the gradients.
"""

from __future__ import annotations

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
