"""The unnormalized read in one pass over memory each way: a program takes some channels of some tokens.

Worth a kernel because torch makes four passes, ten in the backward, and keeps the total weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import launch, size_of
from femixer.kernels.triton_tokens import unserved

# Numbers of a tile and columns at most; programs, each of which sums the gradient of beta over its rows.
ELEMENTS, WIDEST, PROGRAMS = 1024, 128, 1024
READS_RESULTS, REMADE = False, True


def refuse(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> str | None:
    return unserved(mean, free, log_total, beta) if mean.numel() else "there is no token"


def forward(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    whole = torch.empty(mean.shape, dtype=log_total.dtype, device=mean.device)
    energy = torch.empty_like(whole) if free is not None else whole.new_empty(0)
    _launch(_forward, mean, free, log_total, beta, [whole, whole if free is None else energy])
    return whole, energy


def backward(
    grads: tuple[Tensor | None, ...],
    arguments: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    mean, free, log_total, beta = arguments
    to_whole, to_energy = (None if g is None else g.contiguous() for g in grads)
    to_energy = None if free is None else to_energy
    to_mean, to_total = (torch.empty(mean.shape, dtype=x.dtype, device=x.device) for x in (mean, log_total))
    parts = torch.empty(_grid(mean)[1], mean.shape[2] * mean.shape[3], dtype=torch.float32, device=mean.device)
    by = {"BY_MEAN": to_whole is not None, "BY_FREE": to_energy is not None}
    others = [
        mean if to_whole is None else to_whole,
        mean if to_energy is None else to_energy,
        to_mean,
        to_total,
        parts,
    ]
    _launch(_backward, mean, None, log_total, beta, others, **by)
    to_beta = parts.sum(0).to(beta.dtype).view_as(beta) if beta is not None and to_energy is not None else None
    return to_mean, to_energy, to_total, to_beta


def _tile(mean: Tensor) -> tuple[int, int]:
    """Rows and columns."""
    columns = min(WIDEST, triton.next_power_of_2(mean.shape[2] * mean.shape[3]))
    return ELEMENTS // columns, columns


def _grid(mean: Tensor) -> tuple[int, int]:
    """Tiles of columns, and groups of rows."""
    rows, columns = _tile(mean)
    tiles = triton.cdiv(mean.shape[2] * mean.shape[3], columns)
    return tiles, max(1, min(triton.cdiv(mean.shape[0] * mean.shape[1], rows), PROGRAMS // tiles))


def _launch(
    kernel: Any,
    mean: Tensor,
    free: Tensor | None,
    log_total: Tensor,
    beta: Tensor | None,
    others: list[Tensor],
    **flags: bool,
) -> None:
    mean, log_total = mean.contiguous(), log_total.contiguous()
    free, beta = (None if x is None else x.contiguous() for x in (free, beta))
    (batch, length, heads, width), (rows, columns) = mean.shape, _tile(mean)
    launch(
        kernel,
        _grid(mean),
        *(mean, mean if free is None else free, log_total, mean if beta is None else beta),
        *others,
        batch * length,
        moved=size_of(mean, free, log_total, beta, *{id(x): x for x in others}.values()),
        exponentials=mean.numel(),
        FREE=beta is not None,
        **flags,
        WIDTH=heads * width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _forward(
    Mean, Free, Total, Beta, Whole, Energy, rows,
    FREE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    beta = tl.load(Beta + column, mask=(column < WIDTH) & FREE, other=1).to(tl.float32)[None, :]
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        inside = (row < rows - start)[:, None] & (column < WIDTH)[None, :]
        place = tl.cast(start, tl.int64) * WIDTH + (row[:, None] * WIDTH + column[None, :])
        total = tl.load(Total + place, mask=inside, other=0).to(tl.float32)
        mean = tl.load(Mean + place, mask=inside, other=0).to(tl.float32)
        tl.store(Whole + place, mean * tl.exp(total), mask=inside)
        if FREE:
            free = tl.load(Free + place, mask=inside, other=0).to(tl.float32)
            tl.store(Energy + place, free + total / beta, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    Mean, Free, Total, Beta, By_mean, By_free, To_mean, To_total, Parts, rows,
    FREE: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    beta = tl.load(Beta + column, mask=(column < WIDTH) & FREE, other=1).to(tl.float32)[None, :]
    to_beta = tl.zeros([COLUMNS], tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        inside = (row < rows - start)[:, None] & (column < WIDTH)[None, :]
        place = tl.cast(start, tl.int64) * WIDTH + (row[:, None] * WIDTH + column[None, :])
        total = tl.load(Total + place, mask=inside, other=0).to(tl.float32)
        to_mean = tl.zeros([ROWS, COLUMNS], tl.float32)
        to_total = to_mean
        if BY_MEAN:
            to_mean = tl.load(By_mean + place, mask=inside, other=0).to(tl.float32) * tl.exp(total)
            to_total = to_mean * tl.load(Mean + place, mask=inside, other=0).to(tl.float32)
        if BY_FREE:
            slope = tl.load(By_free + place, mask=inside, other=0).to(tl.float32) / beta
            to_total += slope
            to_beta -= tl.sum(tl.where(inside, slope * (total / beta), 0.0), 0)
        tl.store(To_mean + place, to_mean, mask=inside)
        tl.store(To_total + place, to_total, mask=inside)
    if BY_FREE:
        tl.store(Parts + tl.program_id(1) * WIDTH + column, to_beta, mask=column < WIDTH)
