"""Modulation with the product eta = features Mᵀ in the same kernel, so that eta is never in memory.

Torch would write eta, as large as x, and read it again, twice in the backward, with copies of the pieces side by side.
Here each way is one pass: a program takes some rows of some columns. The backward writes the gradient of eta, for torch
to multiply it by M: a sum over columns, which no program has all of. In half precision it also has its rows' part of
the gradient of M, if widths are multiples of 16; elsewhere that needs more registers than there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import HALF_OR_SINGLE, exact_products, launch, size_of, target_of
from femixer.kernels.triton_tokens import sum_parts

ROWS, COLUMNS, MOST_FEATURES, MOST_PIECES = 32, 64, 128, 4
# Programs; each keeps its part of the matrix for all its rows.
PROGRAMS = 1024

READS_ARGUMENTS = ("features", "matrix", "scaled", "widths")
READS_RESULTS = slice(-1, None)


def refuse(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> str | None:
    for each in (x, features, matrix):
        if each.dtype not in HALF_OR_SINGLE:
            return f"it takes float32, bfloat16 and float16, not {each.dtype}"
    if len(widths) > MOST_PIECES:
        return f"{len(widths)} pieces are too many, {MOST_PIECES} are the most"
    if not 0 < matrix.shape[1] <= MOST_FEATURES:
        return f"{matrix.shape[1]} features are too many, {MOST_FEATURES} are the most"
    return None


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given, f, m = _adjacent(x), _adjacent(features), matrix.contiguous()
    rows, width = given.shape
    launch(
        _forward,
        _grid(rows, width),
        given,
        f,
        m,
        y,
        given.stride(0),
        f.stride(0),
        rows,
        width,
        scaled,
        flops=2 * rows * m.numel(),
        **_constants(y, m),
    )
    return *y.split(widths, -1), y


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    _, features, matrix, scaled, widths = arguments
    (y,) = results
    f, m = _adjacent(features), matrix.contiguous()
    rows, width = y.numel() // y.shape[-1], y.shape[-1]
    pieces = [_rows(g, columns, y) for g, columns in zip(grads, widths, strict=False)]
    to_x, to_eta = torch.empty_like(y), torch.empty_like(y)
    grid = _grid(rows, width)
    # Where it fits into registers.
    summed = y.dtype != torch.float32 and all(step % 16 == 0 for step in (width, *(g.stride(0) for g in pieces)))
    to_matrix = torch.empty(grid[1] if summed else 0, width, m.shape[1], dtype=torch.float32, device=y.device)
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    ends += [width] * (MOST_PIECES - len(ends))
    pieces += [pieces[0]] * (MOST_PIECES - len(pieces))
    launch(
        _backward,
        grid,
        *pieces,
        y,
        f,
        m,
        to_x,
        to_eta,
        to_matrix,
        *(g.stride(0) for g in pieces),
        f.stride(0),
        rows,
        width,
        scaled,
        *ends[:3],
        moved=4 * size_of(y) + size_of(f, m, to_matrix),
        flops=(4 if summed else 2) * rows * m.numel(),
        SUMMED=summed,
        **_constants(y, m),
    )
    to_eta = to_eta.view(rows, width)
    to_features = (to_eta @ m.to(y.dtype)).to(features.dtype)
    to_m = sum_parts(to_matrix, matrix.dtype) if summed else (to_eta.mT @ f.to(y.dtype)).to(matrix.dtype)
    return to_x, to_features.view(features.shape), to_m


def _adjacent(x: Tensor) -> Tensor:
    """As rows with adjacent columns, where it lies."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(grad: Tensor | None, width: int, y: Tensor) -> Tensor:
    """The gradient of a piece as rows of adjacent columns."""
    if grad is None:
        return torch.zeros(y.numel() // y.shape[-1], width, dtype=y.dtype, device=y.device)
    grad = grad.reshape(-1, width)
    return grad if grad.stride(-1) == 1 or width == 1 else grad.contiguous()


def _grid(rows: int, width: int) -> tuple[int, int]:
    """Tiles of columns, and groups of rows."""
    tiles = triton.cdiv(width, COLUMNS)
    return tiles, max(1, min(triton.cdiv(rows, ROWS), PROGRAMS // tiles))


def _constants(y: Tensor, matrix: Tensor) -> dict[str, Any]:
    return {
        "FEATURES": matrix.shape[1],
        "LEAST": torch.finfo(y.dtype).eps / 2,
        "PADDED": max(16, triton.next_power_of_2(matrix.shape[1])),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "PRECISION": exact_products(target_of(y)),
        # With four warps an AMD GPU has twice the registers for each.
        "num_warps": 4 if target_of(y).startswith("gfx") else 8,
        "num_stages": 1,
    }


@triton.jit
def _matrix(M, column, width, DTYPE: tl.constexpr, FEATURES: tl.constexpr, PADDED: tl.constexpr):
    feature = tl.arange(0, PADDED)
    inside = (column < width)[:, None] & (feature < FEATURES)[None, :]
    return tl.load(M + column[:, None] * FEATURES + feature[None, :], mask=inside, other=0).to(DTYPE)


@triton.jit
def _features(F, by_row, row, rows, DTYPE: tl.constexpr, FEATURES: tl.constexpr, PADDED: tl.constexpr):
    feature = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (feature < FEATURES)[None, :]
    return tl.load(F + row[:, None] * by_row + feature[None, :], mask=inside, other=0).to(DTYPE)


@triton.jit
def _factors(eta, column, scaled, LEAST: tl.constexpr):
    """1 + eta, or one where eta is added; LEAST where it is closer to zero."""
    factor = 1 + eta
    return tl.where((column < scaled)[None, :], tl.where(tl.abs(factor) < LEAST, LEAST, factor), 1.0)


@triton.jit(do_not_specialize=["rows", "scaled"])
def _forward(
    X, F, M, Y, x_row, f_row, rows, width, scaled,
    FEATURES: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = _matrix(M, column, width, X.dtype.element_ty, FEATURES, PADDED)
    row = tl.arange(0, ROWS)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        # The first row of the tile as a large number, those within it as small ones, which take half the registers.
        first, left = tl.cast(start, tl.int64), rows - start
        f = _features(F + first * f_row, f_row, row, left, X.dtype.element_ty, FEATURES, PADDED)
        eta = tl.dot(f, tl.trans(m), input_precision=PRECISION)
        inside = (row < left)[:, None] & (column < width)[None, :]
        x = tl.load(X + first * x_row + (row[:, None] * x_row + column[None, :]), mask=inside, other=0).to(tl.float32)
        y = x * _factors(eta, column, scaled, LEAST) + tl.where((column < scaled)[None, :], 0.0, eta)
        tl.store(Y + first * width + (row[:, None] * width + column[None, :]), y, mask=inside)


@triton.jit
def _piece(G, by_row, row, column, rows, start, end):
    inside = (row < rows)[:, None] & ((column >= start) & (column < end))[None, :]
    return tl.load(G + (row[:, None] * by_row + (column - start)[None, :]), mask=inside, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "scaled", "end0", "end1", "end2"])
def _backward(
    G0, G1, G2, G3, Y, F, M, ToX, ToEta, ToM, g0_row, g1_row, g2_row, g3_row, f_row, rows, width, scaled, end0,
    end1, end2, SUMMED: tl.constexpr, FEATURES: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d x = g (1 + eta) and d eta = g x = g y / (1 + eta), or g both where eta is added; eta is the forward's, to the
    last bit: what one multiplies by, the other divides by. If SUMMED, ToM [programs, W, C]: what each of
    them has of d M."""
    tile = tl.program_id(0)
    low, high = tile * COLUMNS, tile * COLUMNS + COLUMNS
    row, column = tl.arange(0, ROWS), low + tl.arange(0, COLUMNS)
    m = _matrix(M, column, width, Y.dtype.element_ty, FEATURES, PADDED)
    to_m = tl.zeros([COLUMNS, PADDED], tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        first, left = tl.cast(start, tl.int64), rows - start
        grad = tl.zeros([ROWS, COLUMNS], tl.float32)
        # Few tiles have columns of more than one piece.
        if low < end0:
            grad += _piece(G0 + first * g0_row, g0_row, row, column, left, 0, end0)
        if (low < end1) & (high > end0):
            grad += _piece(G1 + first * g1_row, g1_row, row, column, left, end0, end1)
        if (low < end2) & (high > end1):
            grad += _piece(G2 + first * g2_row, g2_row, row, column, left, end1, end2)
        if high > end2:
            grad += _piece(G3 + first * g3_row, g3_row, row, column, left, end2, width)
        f = _features(F + first * f_row, f_row, row, left, Y.dtype.element_ty, FEATURES, PADDED)
        factor = _factors(tl.dot(f, tl.trans(m), input_precision=PRECISION), column, scaled, LEAST)
        inside = (row < left)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        y = tl.load(Y + first * width + place, mask=inside, other=0).to(tl.float32)
        tl.store(ToX + first * width + place, grad * factor, mask=inside)
        to_eta = tl.where((column < scaled)[None, :], grad * (y / factor), grad)
        tl.store(ToEta + first * width + place, to_eta, mask=inside)
        if SUMMED:
            to_m = tl.dot(tl.trans(to_eta.to(f.dtype)), f, to_m, input_precision=PRECISION)
    if SUMMED:
        feature = tl.arange(0, PADDED)
        place = (tl.program_id(1).to(tl.int64) * width + column)[:, None] * FEATURES + feature[None, :]
        tl.store(ToM + place, to_m, mask=(column < width)[:, None] & (feature < FEATURES)[None, :])
