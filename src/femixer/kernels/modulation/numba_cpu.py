"""Modulation by compiled loops. Few features are multiplied with the matrix there too, because products with so narrow
a matrix cost more elsewhere; for many of them, eta is made by torch for some rows at a time, and stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from femixer.kernels.arrays import array, rows
from femixer.kernels.modulation import numba_loops as loops
from femixer.kernels.operator import filled

FEW = 8
# Numbers of eta at a time, where there are many features.
NUMBERS = 2**20
# Rows whose gradients of the matrix one task sums up, where there are few.
ROWS = 512

READS_ARGUMENTS = ("features", "matrix", "scaled", "widths")
READS_RESULTS = slice(-1, None)


def refuse(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> str | None:
    kinds = {x.dtype, features.dtype, matrix.dtype}
    if kinds != {torch.float32}:
        return f"it takes float32 throughout, not {', '.join(sorted(map(str, kinds)))}"
    return None if x.numel() and features.numel() else "x or features are empty"


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    given, out = rows(x), rows(y)
    if matrix.shape[1] <= FEW:
        loops.forward(given, rows(features), array(matrix.mT.contiguous()), scaled, out)
    else:
        for at, eta in _etas(features.flatten(0, -2), matrix):
            loops.apply(given[at], array(eta), scaled, out[at])
    return *y.split(widths, -1), y


def inference(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    if x.shape[-2] > 1:
        return forward(x, features, matrix, scaled, widths)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    loops.step(rows(x), rows(features), array(matrix), scaled, rows(y))
    return *y.split(widths, -1), y


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    _, features, matrix, scaled, widths = arguments
    (y,) = results
    given = tuple(rows(g) for g in filled(grads, y.split(widths, -1)))
    to_x = torch.empty_like(y)
    out, into = rows(y), rows(to_x)
    if matrix.shape[1] <= FEW:
        m = matrix.mT.contiguous()
        to_features = torch.empty_like(features, memory_format=torch.contiguous_format)
        to_m = m.new_empty(-(-out.shape[0] // ROWS), *m.shape)
        loops.backward(given, out, rows(features), array(m), scaled, into, rows(to_features), array(to_m))
        return to_x, to_features, to_m.sum(0).mT
    f, to_matrix = features.flatten(0, -2), torch.zeros_like(matrix)
    to_f = torch.empty_like(f, memory_format=torch.contiguous_format)
    for at, eta in _etas(f, matrix):
        loops.apply_backward(tuple(g[at] for g in given), out[at], array(eta), scaled, into[at])
        torch.mm(eta, matrix, out=to_f[at])
        to_matrix.addmm_(eta.mT, f[at])
    return to_x, to_f.view(features.shape), to_matrix


def _etas(features: Tensor, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time and their eta = features Mᵀ, one after the other in the same memory."""
    step = max(1, NUMBERS // matrix.shape[0])
    memory = features.new_empty(min(step, features.shape[0]), matrix.shape[0])
    for start in range(0, features.shape[0], step):
        at = slice(start, min(start + step, features.shape[0]))
        yield at, torch.mm(features[at], matrix.mT, out=memory[: at.stop - start])
