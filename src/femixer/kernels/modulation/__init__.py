"""Modulation of projections x by the conditioner's features: x * (1 + eta) or x + eta, with eta = features Mᵀ.

A factor 1 + eta is known to half the eps of its type where eta is close to -1; with half of that more it is never zero.
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


READS_ARGUMENTS = ("features", "matrix", "scaled", "widths")
READS_RESULTS = slice(-1, None)


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    """In torch's operations."""
    f, m, parts = features.to(x.dtype), matrix.to(x.dtype), []
    if scaled:
        parts = [x[..., :scaled] * _factors(f, m[:scaled])]
    if scaled < x.shape[-1]:
        rows = torch.addmm(x[..., scaled:].flatten(0, -2), f.flatten(0, -2), m[scaled:].mT)
        parts.append(rows.view(*x.shape[:-1], rows.shape[-1]))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return *y.split(widths, -1), y


def _factors(features: Tensor, matrix: Tensor) -> Tensor:
    eta = features @ matrix.mT
    # Next to -1, numbers are half of eps apart, so that with half of that more none is zero.
    return (eta + 1).add_(torch.finfo(eta.dtype).eps / 4)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """d x = g (1 + eta) and d eta = g x = g y / (1 + eta), or g both where eta is added."""
    _, features, matrix, scaled, widths = arguments
    (y,) = results
    pieces = zip(grads, y.split(widths, -1), strict=False)
    g = torch.cat([torch.zeros_like(piece) if grad is None else grad for grad, piece in pieces], -1)
    f, m, to_eta = features.to(y.dtype), matrix.to(y.dtype), g
    if scaled:
        # The same product as in the forward pass, to the last bit: what one multiplies by, the other divides by.
        factor = _factors(f, m[:scaled])
        to_eta = (y[..., :scaled] / factor).mul_(g[..., :scaled])
        to_eta = to_eta if scaled == y.shape[-1] else torch.cat([to_eta, g[..., scaled:]], -1)
        g[..., :scaled].mul_(factor)
    to_matrix = to_eta.flatten(0, -2).mT @ f.flatten(0, -2)
    return g, (to_eta @ m).to(features.dtype), to_matrix.to(matrix.dtype)


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
