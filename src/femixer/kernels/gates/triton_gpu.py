"""The gates of a read in one pass over memory each way: a program takes heads of all their channels.

Worth a kernel because torch makes about eight passes over it, twelve in the backward, and keeps what is in between.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.gates import OPERATOR
from femixer.kernels.triton_launch import HALF_OR_SINGLE, all_registers, launch, size_of, target_of
from femixer.kernels.triton_math import sigmoid, softplus

# Numbers that a program holds of each tensor.
ELEMENTS, WIDEST = 1024, 1024

READS_RESULTS = False


def refuse(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> str | None:
    for x in (mean, free, lam, gate):
        if x is not None and (x.dtype not in HALF_OR_SINGLE or x.shape != mean.shape or x.dim() != 4):
            return f"it takes float32, bfloat16 and float16 of one shape [B, T, H, D], not {x.dtype} {tuple(x.shape)}"
    return (
        None if mean.shape[-1] <= WIDEST else f"heads of {mean.shape[-1]} channels are too wide, {WIDEST} are the most"
    )


def forward(
    mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    (out,) = OPERATOR.results(mean, free, lam, gate, eps)
    given = _tokens(mean, free, lam, gate)
    _launch(_forward, given, [out], eps)
    return (out,)


def backward(
    grads: tuple[Tensor, ...],
    arguments: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    *tensors, eps = arguments
    given = _tokens(*tensors, grads[0])
    results = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
    _launch(_backward, given, results, eps)
    return tuple(results)


def _tokens(*tensors: Tensor | None) -> list[Tensor | None]:
    """As [B T, H, D] with adjacent channels, where they lie."""
    found: list[Tensor | None] = []
    for x in tensors:
        if x is not None:
            x = x.reshape(-1, *x.shape[2:])
            x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
        found.append(x)
    return found


def _launch(kernel: Any, given: list[Tensor | None], results: list[Tensor | None], eps: float) -> None:
    mean, free, _, gate = given[:4]
    assert mean is not None
    tokens, heads, width = mean.shape
    columns = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // columns)
    strides = [0 if x is None else x.stride(i) for x in given for i in (0, 1)]
    launch(
        kernel,
        (triton.cdiv(tokens * heads, rows),),
        *(mean if x is None else x for x in given),
        *(mean if x is None else x for x in results),
        *strides,
        tokens * heads,
        heads,
        eps,
        moved=size_of(*given, *results),
        exponentials=mean.numel() * (2 * (gate is not None) + (free is not None)),
        MIXED=free is not None,
        GATED=gate is not None,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        num_warps=4,
        **all_registers(target_of(mean)),
    )


@triton.jit
def _place(row, column, by_token, by_head, heads):
    token = (row // heads).to(tl.int64)
    return token[:, None] * by_token + (row % heads).to(tl.int64)[:, None] * by_head + column[None, :]


@triton.jit(do_not_specialize=["rows", "heads"])
def _forward(
    Mean, Free, Lam, Gate, Out,
    mean_token, mean_head, free_token, free_head, lam_token, lam_head, gate_token, gate_head, rows, heads, eps,
    MIXED: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    read = tl.load(Mean + _place(row, column, mean_token, mean_head, heads), mask=inside, other=0).to(tl.float32)
    if MIXED:
        free = tl.load(Free + _place(row, column, free_token, free_head, heads), mask=inside, other=0).to(tl.float32)
        lam = tl.load(Lam + _place(row, column, lam_token, lam_head, heads), mask=inside, other=0).to(tl.float32)
        read += sigmoid(lam) * (free - read)
    if GATED:
        gate = tl.load(Gate + _place(row, column, gate_token, gate_head, heads), mask=inside, other=0).to(tl.float32)
        positive = tl.where(inside, softplus(gate), 0.0)
        read *= positive * tl.rsqrt(tl.sum(positive * positive, 1) / WIDTH + eps)[:, None]
    tl.store(Out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], read, mask=inside)


@triton.jit(do_not_specialize=["rows", "heads"])
def _backward(
    Mean, Free, Lam, Gate, Grad, ToMean, ToFree, ToLam, ToGate,
    mean_token, mean_head, free_token, free_head, lam_token, lam_head, gate_token, gate_head, grad_token, grad_head,
    rows, heads, eps,
    MIXED: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With r = 1 / rms, p = softplus(b) and g = p r: dp = r (d(g) - g mean(d(g) g))."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    out = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    to_read = tl.load(Grad + _place(row, column, grad_token, grad_head, heads), mask=inside, other=0).to(tl.float32)
    mean = tl.load(Mean + _place(row, column, mean_token, mean_head, heads), mask=inside, other=0).to(tl.float32)
    read = mean
    if MIXED:
        free = tl.load(Free + _place(row, column, free_token, free_head, heads), mask=inside, other=0).to(tl.float32)
        lam = tl.load(Lam + _place(row, column, lam_token, lam_head, heads), mask=inside, other=0).to(tl.float32)
        share = sigmoid(lam)
        read += share * (free - mean)
    if GATED:
        gate = tl.load(Gate + _place(row, column, gate_token, gate_head, heads), mask=inside, other=0).to(tl.float32)
        positive = tl.where(inside, softplus(gate), 0.0)
        inverse = tl.rsqrt(tl.sum(positive * positive, 1) / WIDTH + eps)[:, None]
        g = positive * inverse
        to_g = to_read * read
        along = (tl.sum(to_g * g, 1) / WIDTH)[:, None]
        tl.store(ToGate + out, (to_g - g * along) * inverse * sigmoid(gate), mask=inside)
        to_read *= g
    if MIXED:
        to_free = to_read * share
        to_read -= to_free
        tl.store(ToFree + out, to_free, mask=inside)
        tl.store(ToLam + out, (free - mean) * share * to_read, mask=inside)
    tl.store(ToMean + out, to_read, mask=inside)
