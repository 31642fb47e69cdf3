"""Modulation with the product eta = features Mᵀ in the same kernel, so that eta is never in memory.

Torch would write eta, as large as x, and read it again, twice in the backward, with copies of the pieces side by side.
Here each way is one pass: a program takes some rows of some columns. In the backward, if widths are multiples of 16,
programs have their rows' part of the gradient of M and add their columns' part of the features' in memory, in the order
they come. Elsewhere that needs more registers than there are: the gradient of eta is written, for torch to multiply it.
Where torch is asked for results that repeat to the last bit it is written too, for the features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import HALF_OR_SINGLE, exact_products, launch, size_of, target_of

ROWS, MOST_FEATURES, MOST_PIECES = 32, 128, 4
# Columns of a program, by the bytes of a number: with more of them registers do not suffice.
COLUMNS = {2: 64, 4: 32}
# The most features whose gradient programs sum up, by the same: likewise.
MOST_SUMMED = {2: 128, 4: 64}
# Sums of parts that a program has.
SUMS = 256
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
        _grid(rows, y),
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
    to_x, grid = torch.empty_like(y), _grid(rows, y)
    # Where it fits into registers.
    summed = all(step % 16 == 0 for step in (width, *(g.stride(0) for g in pieces)))
    summed = summed and m.shape[1] <= MOST_SUMMED[y.element_size()]
    to_matrix = torch.empty(grid[1] if summed else 0, width, m.shape[1], dtype=torch.float32, device=y.device)
    added = summed and not torch.are_deterministic_algorithms_enabled()
    to_eta = y if added else torch.empty_like(y)  # which is not written if parts are added
    to_f = (torch.zeros if added else torch.empty)(
        rows if added else 0, m.shape[1], dtype=torch.float32, device=y.device
    )
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
        to_f,
        *(g.stride(0) for g in pieces),
        f.stride(0),
        rows,
        width,
        scaled,
        *ends[:3],
        moved=(3 if added else 4) * size_of(y) + size_of(f, m, to_matrix) + 2 * size_of(to_f),
        flops=2 * (1 + summed + added) * rows * m.numel(),
        loaded=grid[0] * size_of(to_f),
        SUMMED=summed,
        ADDED=added,
        **_constants(y, m),
    )
    to_eta = to_eta.view(rows, width)
    to_features = to_f if added else (to_eta @ m.to(y.dtype)).to(features.dtype)
    if summed:
        to_m, to_features = _finished(to_matrix, matrix.dtype, to_features, features.dtype)
    else:
        to_m = (to_eta.mT @ f.to(y.dtype)).to(matrix.dtype)
    return to_x, to_features.view(features.shape), to_m


def _finished(parts: Tensor, dtype: torch.dtype, added: Tensor, added_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of parts [N, ...], and what was added up, in their types: one launch."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    cast = added if added.dtype == added_dtype else torch.empty_like(added, dtype=added_dtype)
    count = 0 if cast is added else cast.numel()
    tiles = triton.cdiv(total.numel(), SUMS)
    grid = (tiles + triton.cdiv(count, SUMS),)
    moved = size_of(parts, total) + (size_of(added, cast) if count else 0)
    sizes = parts.shape[0], total.numel(), count, tiles
    launch(_finish, grid, parts, total, added, cast, *sizes, moved=moved, BLOCK=SUMS, num_warps=4)
    return total, cast


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


def _grid(rows: int, y: Tensor) -> tuple[int, int]:
    """Tiles of columns, and groups of rows."""
    tiles = triton.cdiv(y.shape[-1], COLUMNS[y.element_size()])
    return tiles, max(1, min(triton.cdiv(rows, ROWS), PROGRAMS // tiles))


def _constants(y: Tensor, matrix: Tensor) -> dict[str, Any]:
    return {
        "FEATURES": matrix.shape[1],
        "LEAST": torch.finfo(y.dtype).eps / 2,
        "PADDED": max(16, triton.next_power_of_2(matrix.shape[1])),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS[y.element_size()],
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
    G0, G1, G2, G3, Y, F, M, ToX, ToEta, ToM, ToF, g0_row, g1_row, g2_row, g3_row, f_row, rows, width, scaled, end0,
    end1, end2, SUMMED: tl.constexpr, ADDED: tl.constexpr, FEATURES: tl.constexpr, LEAST: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d x = g (1 + eta) and d eta = g x = g y / (1 + eta), or g both where eta is added; eta is the forward's, to the
    last bit: what one multiplies by, the other divides by. If SUMMED, ToM [programs, W, C]: what each of
    them has of d M. If ADDED, to ToF [rows, C] each adds what its columns have of d F, and ToEta is not written."""
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
        if ADDED:
            feature = tl.arange(0, PADDED)
            to_f = tl.dot(to_eta.to(m.dtype), m, input_precision=PRECISION)
            some = (row < left)[:, None] & (feature < FEATURES)[None, :]
            at = ToF + first * FEATURES + (row[:, None] * FEATURES + feature[None, :])
            tl.atomic_add(at, to_f, mask=some, sem="relaxed")
        else:
            tl.store(ToEta + first * width + place, to_eta, mask=inside)
        if SUMMED:
            to_m = tl.dot(tl.trans(to_eta.to(f.dtype)), f, to_m, input_precision=PRECISION)
    if SUMMED:
        feature = tl.arange(0, PADDED)
        place = (tl.program_id(1).to(tl.int64) * width + column)[:, None] * FEATURES + feature[None, :]
        tl.store(ToM + place, to_m, mask=(column < width)[:, None] & (feature < FEATURES)[None, :])


@triton.jit(do_not_specialize=["parts", "sums", "count", "tiles"])
def _finish(PARTS, TOTAL, ADDED, CAST, parts, sums, count, tiles, BLOCK: tl.constexpr):
    """TOTAL: sums of PARTS [parts, sums], by the first programs; CAST: of what was ADDED [count], by the others."""
    program = tl.program_id(0).to(tl.int64)
    if program < tiles:
        place = program * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(parts):
            total += tl.load(PARTS + tl.cast(i, tl.int64) * sums + place, mask=place < sums, other=0)
        tl.store(TOTAL + place, total, mask=place < sums)
    else:
        place = (program - tiles) * BLOCK + tl.arange(0, BLOCK)
        tl.store(CAST + place, tl.load(ADDED + place, mask=place < count), mask=place < count)
