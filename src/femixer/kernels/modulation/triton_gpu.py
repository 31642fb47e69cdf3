"""Modulation with the product eta = features Mᵀ in the same kernel, so that eta is never in memory.

Torch would write eta, as large as x, and read it again; in the backward also its gradient, and copies of the pieces
side by side. Here each way is one pass over x or y: a program takes some rows of some columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import exact_products, launch, size_of, target_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLUMNS, MOST_FEATURES, MOST_PIECES = 32, 128, 128, 4
# Programs of the backward, each of which sums the gradient of the matrix over its rows.
PROGRAMS = 512

READS_ARGUMENTS = ("features", "matrix", "scaled", "widths")
READS_RESULTS = slice(-1, None)


def refuse(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> str | None:
    for each in (x, features, matrix):
        if each.dtype not in FLOATS:
            return f"it takes float32, bfloat16 and float16, not {each.dtype}"
    if len(widths) > MOST_PIECES:
        return f"{len(widths)} pieces are too many, {MOST_PIECES} are the most"
    if not 0 < matrix.shape[1] <= MOST_FEATURES:
        return f"{matrix.shape[1]} features are too many, {MOST_FEATURES} are the most"
    return None


def forward(x: Tensor, features: Tensor, matrix: Tensor, scaled: int, widths: list[int]) -> tuple[Tensor, ...]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given, f, m = x.reshape(-1, x.shape[-1]), features.reshape(-1, features.shape[-1]), matrix.contiguous()
    rows, width = given.shape
    launch(
        _forward,
        (triton.cdiv(width, COLUMNS), triton.cdiv(rows, ROWS)),
        given,
        f,
        m,
        y,
        given.stride(0),
        f.stride(0),
        rows,
        flops=2 * rows * m.numel(),
        **_constants(y, m, scaled),
    )
    return *y.split(widths, -1), y


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    _, features, matrix, scaled, widths = arguments
    (y,) = results
    f, m = features.reshape(-1, features.shape[-1]), matrix.contiguous()
    rows, width = y.numel() // y.shape[-1], y.shape[-1]
    pieces = [_rows(g, width, y) for g, width in zip(grads, widths, strict=False)]
    to_x = torch.empty_like(y)
    tiles = triton.cdiv(width, COLUMNS)
    groups = max(1, min(triton.cdiv(rows, ROWS), PROGRAMS // tiles))
    # Each tile of columns has its share of the features' gradient, each group of rows its share of the matrix's.
    shares = torch.empty(tiles, rows, m.shape[1], dtype=torch.float32, device=y.device)
    sums = torch.empty(groups, *m.shape, dtype=torch.float32, device=y.device)
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    ends += [width] * (MOST_PIECES - len(ends))
    pieces += [pieces[0]] * (MOST_PIECES - len(pieces))
    launch(
        _backward,
        (tiles, groups),
        *pieces,
        y,
        f,
        m,
        to_x,
        shares,
        sums,
        *(g.stride(0) for g in pieces),
        f.stride(0),
        rows,
        moved=3 * size_of(y) + size_of(f, m, shares, sums),
        flops=6 * rows * m.numel(),
        END0=ends[0],
        END1=ends[1],
        END2=ends[2],
        **_constants(y, m, scaled),
    )
    return to_x, shares.sum(0).to(features.dtype).view(features.shape), sums.sum(0).to(matrix.dtype)


def _rows(grad: Tensor | None, width: int, y: Tensor) -> Tensor:
    """The gradient of a piece as rows of adjacent columns."""
    if grad is None:
        return torch.zeros(y.numel() // y.shape[-1], width, dtype=y.dtype, device=y.device)
    grad = grad.reshape(-1, width)
    return grad if grad.stride(-1) == 1 or width == 1 else grad.contiguous()


def _constants(y: Tensor, matrix: Tensor, scaled: int) -> dict[str, Any]:
    return {
        "WIDTH": y.shape[-1],
        "SCALED": scaled,
        "FEATURES": matrix.shape[1],
        "LEAST": torch.finfo(y.dtype).eps / 2,
        "PADDED": max(16, triton.next_power_of_2(matrix.shape[1])),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "PRECISION": exact_products(target_of(y)),
        "num_warps": 4,
    }


@triton.jit
def _eta(F, M, row, column, rows, by_row, DTYPE: tl.constexpr,
         WIDTH: tl.constexpr, FEATURES: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Some rows of the features and of the matrix, and their products."""
    feature = tl.arange(0, PADDED)
    f = tl.load(
        F + row.to(tl.int64)[:, None] * by_row + feature[None, :],
        mask=(row < rows)[:, None] & (feature < FEATURES)[None, :],
        other=0,
    ).to(DTYPE)
    m = tl.load(
        M + column[:, None] * FEATURES + feature[None, :],
        mask=(column < WIDTH)[:, None] & (feature < FEATURES)[None, :],
        other=0,
    ).to(DTYPE)
    return f, m, tl.dot(f, tl.trans(m), input_precision=PRECISION)


@triton.jit
def _factors(eta, column, SCALED: tl.constexpr, LEAST: tl.constexpr):
    """1 + eta, or one where eta is added; LEAST where it is closer to zero."""
    factor = 1 + eta
    return tl.where((column < SCALED)[None, :], tl.where(tl.abs(factor) < LEAST, LEAST, factor), 1.0)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    X, F, M, Y, x_row, f_row, rows,
    WIDTH: tl.constexpr, SCALED: tl.constexpr, FEATURES: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    _, _, eta = _eta(F, M, row, column, rows, f_row, X.dtype.element_ty, WIDTH, FEATURES, PADDED, PRECISION)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(X + row.to(tl.int64)[:, None] * x_row + column[None, :], mask=inside, other=0).to(tl.float32)
    y = x * _factors(eta, column, SCALED, LEAST) + tl.where((column < SCALED)[None, :], 0.0, eta)
    tl.store(Y + row.to(tl.int64)[:, None] * WIDTH + column[None, :], y, mask=inside)


@triton.jit
def _piece(G, by_row, row, column, rows, START: tl.constexpr, END: tl.constexpr):
    inside = (row < rows)[:, None] & ((column >= START) & (column < END))[None, :]
    return tl.load(G + row.to(tl.int64)[:, None] * by_row + (column - START)[None, :], mask=inside, other=0).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["rows"])
def _backward(
    G0, G1, G2, G3, Y, F, M, ToX, Shares, Sums, g0_row, g1_row, g2_row, g3_row, f_row, rows,
    END0: tl.constexpr, END1: tl.constexpr, END2: tl.constexpr,
    WIDTH: tl.constexpr, SCALED: tl.constexpr, FEATURES: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d x = g (1 + eta) and d eta = g x = g y / (1 + eta), or g both where eta is added; eta is the forward's, to the
    last bit: what one multiplies by, the other divides by."""
    tile = tl.program_id(0)
    first = tile * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    feature = tl.arange(0, PADDED)
    total = tl.zeros([COLUMNS, PADDED], tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        grad = tl.zeros([ROWS, COLUMNS], tl.float32)
        # Few tiles have columns of more than one piece.
        if first < END0:
            grad += _piece(G0, g0_row, row, column, rows, 0, END0)
        if (first < END1) & (first + COLUMNS > END0):
            grad += _piece(G1, g1_row, row, column, rows, END0, END1)
        if (first < END2) & (first + COLUMNS > END1):
            grad += _piece(G2, g2_row, row, column, rows, END1, END2)
        if first + COLUMNS > END2:
            grad += _piece(G3, g3_row, row, column, rows, END2, WIDTH)
        f, m, eta = _eta(F, M, row, column, rows, f_row, Y.dtype.element_ty, WIDTH, FEATURES, PADDED, PRECISION)
        factor = _factors(eta, column, SCALED, LEAST)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        y = tl.load(Y + place, mask=inside, other=0).to(tl.float32)
        tl.store(ToX + place, grad * factor, mask=inside)
        to_eta = tl.where((column < SCALED)[None, :], grad * (y / factor), grad).to(Y.dtype.element_ty)
        share = tl.dot(to_eta, m, input_precision=PRECISION)
        at = (tile.to(tl.int64) * rows + row)[:, None] * FEATURES + feature[None, :]
        tl.store(Shares + at, share, mask=(row < rows)[:, None] & (feature < FEATURES)[None, :])
        total += tl.dot(tl.trans(to_eta), f, input_precision=PRECISION)
    at = (tl.program_id(1) * WIDTH + column)[:, None] * FEATURES + feature[None, :]
    tl.store(Sums + at, total, mask=(column < WIDTH)[:, None] & (feature < FEATURES)[None, :])
