"""The RMS norm in one pass over the memory each way: a program takes rows of all channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import launch

# Numbers that a program holds at a time of narrow rows, and the widest row it takes.
ELEMENTS, WIDEST = 2048, 16384
# Programs of the backward: each sums the gradient of the weight over its rows.
PROGRAMS = 512


def refuse(x: Tensor, weight: Tensor, eps: float) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {x.dtype}"
    return None if x.shape[-1] <= WIDEST else f"rows of {x.shape[-1]} channels are too wide, {WIDEST} are the most"


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    given, weight = _rows(x), weight.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = given.shape
    tile = _tile(width)
    launch(_forward, (triton.cdiv(rows, tile[0]),), given, weight, y, rows, width, eps, ROWS=tile[0], WIDTH=tile[1])
    return (y,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor, float],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    x, weight, eps = arguments
    given, grad, weight = _rows(x), _rows(grads[0]), weight.contiguous()
    rows, width = given.shape
    tile = _tile(width)
    programs = min(PROGRAMS, triton.cdiv(rows, tile[0]))
    to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    operands = grad, given, weight, to_x, parts, rows, width, eps
    launch(_backward, (programs,), *operands, ROWS=tile[0], WIDTH=tile[1])
    return to_x, parts.sum(0).to(weight.dtype)


READS_RESULTS = False


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _tile(width: int) -> tuple[int, int]:
    """Rows at a time, and the channels of a row rounded up."""
    columns = triton.next_power_of_2(width)
    return max(1, ELEMENTS // columns), columns


@triton.jit(do_not_specialize=["rows"])
def _forward(X, W, Y, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    x = tl.load(X + place, mask=inside, other=0).to(tl.float32)
    weight = tl.load(W + column, mask=column < width, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(Y + place, x * scale[:, None] * weight[None, :], mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(G, X, W, DX, DW, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """dx = r (w g - x r² mean(w g x)), dw = sum g x r, with r = 1 / rms; DW has one row per program."""
    column = tl.arange(0, WIDTH)
    weight = tl.load(W + column, mask=column < width, other=0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        x = tl.load(X + place, mask=inside, other=0).to(tl.float32)
        grad = tl.load(G + place, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
        inner = grad * weight[None, :]
        slope = (tl.sum(inner * x, 1) / width)[:, None] * scale * scale
        tl.store(DX + place, scale * (inner - x * slope), mask=inside)
        total += tl.sum(grad * x * scale, 0)
    tl.store(DW + tl.program_id(0) * width + column, total, mask=column < width)
