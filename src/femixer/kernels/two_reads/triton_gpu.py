"""Two reads as one in one pass over memory each way: a program takes tokens of one head.

Worth a kernel because torch makes about thirty passes over it, in float64, and twice as many in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import HALF_OR_SINGLE, launch, size_of
from femixer.kernels.triton_math import expm1, log1p, shares, softplus

# Numbers that a program holds of each tensor.
ELEMENTS, WIDEST = 1024, 1024
READS_RESULTS = False


def refuse(mean: Tensor, *others: Any) -> str | None:
    if mean.dtype not in HALF_OR_SINGLE:
        return f"it takes float32, bfloat16 and float16, not {mean.dtype}"
    width = mean.shape[-1]
    return None if width <= WIDEST else f"heads of {width} channels are too wide, {WIDEST} are the most"


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    given, free = _contiguous(arguments), arguments[1]
    results = [torch.empty_like(given[0]), given[0] if free is None else torch.empty_like(given[1])]
    results.append(torch.empty_like(given[2]))
    _launch(_forward, given, results, free is not None)
    return results[0], results[0].new_empty(0) if free is None else results[1], results[2]


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    given, has_free = _contiguous(arguments), arguments[1] is not None
    by = [given[0] if g is None else g.contiguous() for g in grads]
    found = [torch.empty_like(x) for x in given[:6]]
    batch, length, heads, width = given[0].shape
    blocks = triton.cdiv(batch * length, _rows(width))
    to_beta = torch.empty(blocks, heads, width, dtype=torch.float32, device=given[0].device)
    flags = {f"BY_{name}": g is not None for name, g in zip(("MEAN", "FREE", "TOTAL"), grads, strict=True)}
    _launch(_backward, [*given, *by], [*found, to_beta], has_free, **flags)
    if not has_free:
        return found[0], None, found[2], found[3], None, found[5], None
    return *found, to_beta.sum(0).to(given[6].dtype)


def _contiguous(arguments: tuple[Any, ...]) -> list[Tensor]:
    """What is missing is stood in for by the mean, which is not read then."""
    return [(arguments[0] if x is None else x).contiguous() for x in arguments]


def _rows(width: int) -> int:
    return max(1, ELEMENTS // triton.next_power_of_2(width))


def _launch(kernel: Any, given: list[Tensor], results: list[Tensor], free: bool, **flags: bool) -> None:
    batch, length, heads, width = given[0].shape
    rows = _rows(width)
    launch(
        kernel,
        (triton.cdiv(batch * length, rows), heads),
        *given,
        *results,
        batch * length,
        length,
        heads,
        moved=size_of(*given, *results),
        exponentials=4 * given[0].numel(),
        FREE=free,
        PER_HEAD=given[2].shape[-1] == 1 and width > 1,
        **flags,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ROWS=rows,
        num_warps=4,
    )


@triton.jit
def _places(
    tokens, length, heads, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Where past and future of some tokens of a head are, with and without channels; and which of them exist."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mirrored = (token // length) * length + length - 1 - token % length
    column = tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    past = (token.to(tl.int64) * heads + head)[:, None]
    future = (mirrored.to(tl.int64) * heads + head)[:, None]
    inside = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    here, there = past * WIDTH + column[None, :], future * WIDTH + column[None, :]
    if PER_HEAD:
        return here, there, past + 0 * column[None, :], future + 0 * column[None, :], inside, column
    return here, there, here, there, inside, column


@triton.jit
def _odds(Total, Later, at, later_at, inside):
    """The past's log total, the odds of the future, and whether there is one."""
    ours = tl.load(Total + at, mask=inside, other=0.0).to(tl.float32)
    theirs = tl.load(Later + later_at, mask=inside, other=0.0).to(tl.float32)
    empty = theirs == float("-inf")
    ours = tl.where(ours == float("-inf"), 0.0, ours)
    return ours, tl.where(empty, 0.0, theirs) - ours, empty


@triton.jit
def _mixed(free, other, beta, share, rest, odds):
    """F of both, and the future's share of it."""
    rise = beta * (other - free)
    apart = tl.abs(rise)
    above = tl.maximum(free, other)
    low = tl.where(rise <= 0, share, rest)
    # exp(-apart) below and 1 above; near each other relative to 1, else relative to the larger part.
    log_high = -softplus(tl.where(rise <= 0, odds, -odds))
    log_low = -softplus(tl.where(rise <= 0, -odds, odds)) - apart
    top = tl.maximum(log_high, log_low)
    far = top + log1p(tl.exp(tl.minimum(log_high, log_low) - top))
    near = log1p(tl.maximum(low * expm1(-tl.minimum(apart, 1.0)), -0.9))
    both = above + tl.where(apart < 1, near, far) / beta
    part, _ = shares(odds + rise)
    return both, part


@triton.jit(do_not_specialize=["tokens", "length", "heads"])
def _forward(
    Mean, Free, Total, Later_mean, Later_free, Later_total, Beta, Out_mean, Out_free, Out_total, tokens, length,
    heads, FREE: tl.constexpr, PER_HEAD: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    here, there, at, later_at, inside, column = _places(tokens, length, heads, WIDTH, COLUMNS, ROWS, PER_HEAD)
    ours, odds, empty = _odds(Total, Later_total, at, later_at, inside)
    share, rest = shares(odds)
    share, rest = tl.where(empty, 0.0, share), tl.where(empty, 1.0, rest)
    mean = tl.load(Mean + here, mask=inside, other=0.0).to(tl.float32)
    later = tl.where(empty, mean, tl.load(Later_mean + there, mask=inside, other=0.0).to(tl.float32))
    tl.store(Out_mean + here, mean + share * (later - mean), mask=inside)
    tl.store(Out_total + at, tl.where(empty, ours, ours + softplus(odds)), mask=inside)
    if FREE:
        beta = tl.load(Beta + tl.program_id(1) * WIDTH + column, mask=column < WIDTH, other=1.0).to(tl.float32)
        free = tl.load(Free + here, mask=inside, other=0.0).to(tl.float32)
        other = tl.where(empty, free, tl.load(Later_free + there, mask=inside, other=0.0).to(tl.float32))
        both, _ = _mixed(free, other, beta[None, :], share, rest, odds)
        tl.store(Out_free + here, tl.where(empty, free, both), mask=inside)


@triton.jit(do_not_specialize=["tokens", "length", "heads"])
def _backward(
    Mean, Free, Total, Later_mean, Later_free, Later_total, Beta, By_mean, By_free, By_total,
    To_mean, To_free, To_total, To_later_mean, To_later_free, To_later_total, To_beta, tokens, length, heads,
    FREE: tl.constexpr, PER_HEAD: tl.constexpr, BY_MEAN: tl.constexpr, BY_FREE: tl.constexpr, BY_TOTAL: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With the future's share s of the weight and q of the free energy (zero where there is no future):

    dF = (1 - q) dF_past + q dF_future + (q - s) dodds / beta + ((1 - q) F_past + q F_future - F) dbeta / beta
    """
    here, there, at, later_at, inside, column = _places(tokens, length, heads, WIDTH, COLUMNS, ROWS, PER_HEAD)
    ours, odds, empty = _odds(Total, Later_total, at, later_at, inside)
    share, rest = shares(odds)
    share, rest = tl.where(empty, 0.0, share), tl.where(empty, 1.0, rest)
    zero = tl.zeros([ROWS, COLUMNS], tl.float32)
    by_mean, by_total, to_odds = zero, zero, zero
    if BY_MEAN:
        by_mean = tl.load(By_mean + here, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(Mean + here, mask=inside, other=0.0).to(tl.float32)
        later = tl.where(empty, mean, tl.load(Later_mean + there, mask=inside, other=0.0).to(tl.float32))
        to_odds += tl.where(inside, by_mean * share * rest * (later - mean), 0.0)
    tl.store(To_mean + here, by_mean * rest, mask=inside)
    tl.store(To_later_mean + there, by_mean * share, mask=inside)
    if FREE:
        by_free, part, to_beta = zero, zero, zero
        if BY_FREE:
            beta = tl.load(Beta + tl.program_id(1) * WIDTH + column, mask=column < WIDTH, other=1.0).to(tl.float32)
            by_free = tl.load(By_free + here, mask=inside, other=0.0).to(tl.float32)
            free = tl.load(Free + here, mask=inside, other=0.0).to(tl.float32)
            other = tl.where(empty, free, tl.load(Later_free + there, mask=inside, other=0.0).to(tl.float32))
            both, part = _mixed(free, other, beta[None, :], share, rest, odds)
            part = tl.where(empty, 0.0, part)
            to_odds += tl.where(inside, by_free * (part - share) / beta[None, :], 0.0)
            gap = (free - both) + part * (other - free)
            to_beta = tl.where(inside & (empty == 0), by_free * gap / beta[None, :], 0.0)
        tl.store(To_free + here, by_free * (1 - part), mask=inside)
        tl.store(To_later_free + there, by_free * part, mask=inside)
        place = (tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)) * WIDTH + column
        tl.store(To_beta + place, tl.sum(to_beta, 0), mask=column < WIDTH)
    if BY_TOTAL:
        by_total = tl.load(By_total + at, mask=inside, other=0.0).to(tl.float32)
    first = column[None, :] == 0
    if PER_HEAD:
        # Once per head: its channels share the total.
        to_odds = tl.sum(to_odds, 1)[:, None] + zero
        inside = inside & first
    tl.store(To_total + at, by_total * rest - to_odds, mask=inside)
    tl.store(To_later_total + later_at, by_total * share + to_odds, mask=inside)
