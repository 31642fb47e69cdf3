"""Modulation in torch's operations."""

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import filled

READS_ARGUMENTS = ("features", "matrix", "scaled", "widths")
READS_RESULTS = slice(-1, None)


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    eta = features.to(x.dtype) @ matrix.to(x.dtype).mT
    if scaled == 0:
        y = x + eta
    elif scaled == x.shape[-1]:
        y = x * _factors(eta)
    else:
        y = torch.cat([x[..., :scaled] * _factors(eta[..., :scaled]), x[..., scaled:] + eta[..., scaled:]], -1)
    return *y.split(widths, -1), y


def _factors(eta: Tensor) -> Tensor:
    factor = 1 + eta
    # Numbers next to -1 are half of eps apart, so that a factor below that is zero.
    return factor.masked_fill(factor == 0, torch.finfo(eta.dtype).eps / 2)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """d x = g (1 + eta) and d eta = g x = g y / (1 + eta), or g both where eta is added."""
    _, features, matrix, scaled, widths = arguments
    (y,) = results
    g = torch.cat(filled(grads, y.split(widths, -1)), -1)
    f, m = features.to(y.dtype), matrix.to(y.dtype)
    to_x = to_eta = g
    if scaled:
        # The same product as in the forward pass, to the last bit: what one multiplies by, the other divides by.
        factor = _factors((f @ m.mT)[..., :scaled])
        to_x, to_eta = g[..., :scaled] * factor, g[..., :scaled] * (y[..., :scaled] / factor)
        if scaled < y.shape[-1]:
            to_x, to_eta = (torch.cat([part, g[..., scaled:]], -1) for part in (to_x, to_eta))
    to_matrix = to_eta.flatten(0, -2).mT @ f.flatten(0, -2)
    return to_x, (to_eta @ m).to(features.dtype), to_matrix.to(matrix.dtype)
