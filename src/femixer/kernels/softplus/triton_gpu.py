"""The scaled softplus in one pass over memory each way: a program takes some columns of some rows.

Worth a kernel because logits in half precision would be widened, shifted, mapped and scaled in a pass each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels import triton_math
from femixer.kernels.softplus import OPERATOR
from femixer.kernels.triton_launch import launch
from femixer.kernels.triton_tokens import unserved

# Numbers of a tile and columns at most; programs, each of which sums the gradient of the bias over its rows.
ELEMENTS, WIDEST, PROGRAMS = 1024, 128, 1024
READS_RESULTS = False


def refuse(x: Tensor, bias: Tensor | None, scale: float, floor: float) -> str | None:
    return unserved(x, bias) if x.numel() else "x is empty"


def REMADE(x: Tensor, *others: Any) -> bool:
    """Where what is not kept is worth a launch."""
    return x.shape[-1] >= WIDEST


def forward(x: Tensor, bias: Tensor | None, scale: float, floor: float) -> tuple[Tensor, ...]:
    (y,) = OPERATOR.results(x, bias, scale, floor)
    _launch(_forward, x, bias, (y,), floor, SCALE=scale)
    return (y,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor | None, float, float],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    x, bias, scale, _ = arguments
    to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if bias is None:
        _launch(_backward, x, bias, (grads[0].contiguous(), to_x, to_x), 0.0, SCALE=scale, SUMMED=False)
        return to_x, None
    parts = torch.empty(_grid(x, bias)[1], bias.numel(), dtype=torch.float32, device=x.device)
    _launch(_backward, x, bias, (grads[0].contiguous(), to_x, parts), 0.0, SCALE=scale, SUMMED=True)
    return to_x, parts.sum(0).to(bias.dtype).view_as(bias)


def _width(x: Tensor, bias: Tensor | None) -> int:
    return x.shape[-1] if bias is None else bias.numel()


def _tile(x: Tensor, bias: Tensor | None) -> tuple[int, int]:
    """Rows and columns."""
    columns = min(WIDEST, triton.next_power_of_2(_width(x, bias)))
    return ELEMENTS // columns, columns


def _grid(x: Tensor, bias: Tensor | None) -> tuple[int, int]:
    """Tiles of columns, and groups of rows."""
    rows, columns = _tile(x, bias)
    tiles = triton.cdiv(_width(x, bias), columns)
    return tiles, max(1, min(triton.cdiv(x.numel() // _width(x, bias), rows), PROGRAMS // tiles))


def _launch(
    kernel: Any, x: Tensor, bias: Tensor | None, others: tuple[Tensor, ...], floor: float, **flags: Any
) -> None:
    width, (rows, columns) = _width(x, bias), _tile(x, bias)
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 or width == 1 else flat.contiguous()
    launch(
        kernel,
        _grid(x, bias),
        flat,
        flat if bias is None else bias.contiguous(),
        *others,
        flat.stride(0),
        flat.shape[0],
        floor,
        exponentials=x.numel() * (2 if kernel is _forward else 1),
        **flags,
        BIASED=bias is not None,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


@triton.jit
def _logits(X, bias, x_row, first, row, column, inside):
    place = X + first * x_row + (row[:, None] * x_row + column[None, :])
    return tl.load(place, mask=inside, other=0).to(tl.float32) + bias


@triton.jit
def _bias(Bias, column, BIASED: tl.constexpr, WIDTH: tl.constexpr):
    bias = tl.zeros_like(column).to(tl.float32)
    if BIASED:
        bias = tl.load(Bias + column, mask=column < WIDTH, other=0).to(tl.float32)
    return bias[None, :]


@triton.jit(do_not_specialize=["rows"])
def _forward(
    X, Bias, Y, x_row, rows, floor, SCALE: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    bias = _bias(Bias, column, BIASED, WIDTH)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        first = tl.cast(start, tl.int64)
        inside = (row < rows - start)[:, None] & (column < WIDTH)[None, :]
        x = _logits(X, bias, x_row, first, row, column, inside)
        y = SCALE * triton_math.softplus(x) + floor
        tl.store(Y + first * WIDTH + (row[:, None] * WIDTH + column[None, :]), y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    X, Bias, Grad, ToX, Parts, x_row, rows, floor, SCALE: tl.constexpr, SUMMED: tl.constexpr, BIASED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    bias = _bias(Bias, column, BIASED, WIDTH)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        first = tl.cast(start, tl.int64)
        inside = (row < rows - start)[:, None] & (column < WIDTH)[None, :]
        x = _logits(X, bias, x_row, first, row, column, inside)
        place = first * WIDTH + (row[:, None] * WIDTH + column[None, :])
        to_x = SCALE * tl.load(Grad + place, mask=inside, other=0).to(tl.float32) * triton_math.sigmoid(x)
        tl.store(ToX + place, to_x, mask=inside)
        if SUMMED:
            total += tl.sum(tl.where(inside, to_x, 0.0), 0)
    if SUMMED:
        tl.store(Parts + tl.program_id(1) * WIDTH + column, total, mask=column < WIDTH)
