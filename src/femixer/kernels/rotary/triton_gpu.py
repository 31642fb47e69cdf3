"""Rotary positions of queries and keys in one launch each way, one pass over memory: a program takes tokens of a head.

Worth a kernel because torch rotates through complex numbers of float32, with copies before and after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import HALF_OR_SINGLE, launch, size_of

ELEMENTS, WIDEST = 2048, 1024

READS_RESULTS, REMADE = False, True


def refuse(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> str | None:
    if q.dtype not in HALF_OR_SINGLE or k.dtype != q.dtype or cos.dtype != torch.float32:
        return (
            "it takes float32, bfloat16 and float16 with angles of float32, "
            f"not q of {q.dtype}, k of {k.dtype}, cos of {cos.dtype}"
        )
    return None if q.shape[-1] <= WIDEST else f"heads of {q.shape[-1]} channels are too wide, {WIDEST} are the most"


def forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, floor: float | None) -> tuple[Tensor, ...]:
    results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    _launch([q, k], [q, k], cos, sin, results, None if floor is None else float(floor), back=False)
    return tuple(results)


def backward(
    grads: tuple[Tensor | None, ...],
    arguments: tuple[Tensor, Tensor, Tensor, Tensor, float | None],
    _: object,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    q, k, cos, sin, floor = arguments
    given = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, (q, k), strict=True)]
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    _launch(given, [q, k], cos, sin, found, floor, back=True)
    return *(to_x if x is not None else None for x, to_x in zip(grads, found, strict=True)), None, None


def _launch(
    given: list[Tensor],
    seen: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    out: list[Tensor],
    floor: float | None,
    back: bool,
) -> None:
    """given: what is rotated; seen: queries and keys, where the gradient wants to know which features are positive."""
    (batch, length, heads, width), groups = given[0].shape, given[1].shape[2]
    columns = max(2, triton.next_power_of_2(width))
    rows = max(1, ELEMENTS // columns)
    given = [_tokens(x) for x in given]
    seen = [_tokens(x) for x in seen] if back and floor is not None else given
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens = batch * length
    launch(
        _rotate,
        (triton.cdiv(tokens, rows), heads + groups),
        *given,
        *seen,
        *out,
        cos,
        sin,
        *(x.stride(i) for x in (*given, *seen) for i in (0, 1)),
        tokens,
        cos.shape[0] * length,
        0.0 if floor is None else floor,
        moved=size_of(*given, *out, cos, sin) + (size_of(*seen) if seen is not given else 0),
        FLOORED=floor is not None,
        BACK=back,
        HEADS=heads,
        GROUPS=groups,
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        num_warps=4,
    )


def _tokens(x: Tensor) -> Tensor:
    """As [B T, H, E] with adjacent channels, where it lies."""
    x = x.reshape(-1, *x.shape[2:])
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["tokens", "angles"])
def _rotate(
    Q, K, QSeen, KSeen, ToQ, ToK, Cos, Sin,
    q_token, q_head, k_token, k_head, q_seen_token, q_seen_head, k_seen_token, k_seen_head, tokens, angles, floor,
    FLOORED: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """angles: how many tokens have angles of their own; those of the first sequence serve all if they are fewer."""
    head = tl.program_id(1).to(tl.int64)
    # fmt: off
    if head < HEADS:
        _rotate_head(Q + head * q_head, QSeen + head * q_seen_head, ToQ + head * WIDTH, Cos, Sin,
                     q_token, q_seen_token, tokens, angles, floor, FLOORED, BACK, HEADS, WIDTH, COLUMNS, ROWS)
    else:
        head -= HEADS
        _rotate_head(K + head * k_head, KSeen + head * k_seen_head, ToK + head * WIDTH, Cos, Sin,
                     k_token, k_seen_token, tokens, angles, floor, FLOORED, BACK, GROUPS, WIDTH, COLUMNS, ROWS)
    # fmt: on


@triton.jit
def _turned(x, cos, sin, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    a, b = tl.split(tl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [ROWS, COLUMNS])


@triton.jit
def _rotate_head(
    X, Seen, Out, Cos, Sin, by_token, seen_by_token, tokens, angles, floor,
    FLOORED: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pair = tl.arange(0, COLUMNS // 2)
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    token = row.to(tl.int64)[:, None]
    x = tl.load(X + token * by_token + column[None, :], mask=inside, other=0).to(tl.float32)
    angle = (row % angles).to(tl.int64)[:, None] * (WIDTH // 2) + pair[None, :]
    there = (row < tokens)[:, None] & (pair < WIDTH // 2)[None, :]
    cos, sin = tl.load(Cos + angle, mask=there, other=0), tl.load(Sin + angle, mask=there, other=0)
    if BACK and FLOORED:
        seen = tl.load(Seen + token * seen_by_token + column[None, :], mask=inside, other=0).to(tl.float32)
        x = tl.where(_turned(seen, cos, sin, ROWS, COLUMNS) > 0, x, 0.0)
    y = _turned(x, cos, -sin if BACK else sin, ROWS, COLUMNS)
    if FLOORED and not BACK:
        y = tl.maximum(y, 0.0) + floor
    tl.store(Out + token * (HEADS * WIDTH) + column[None, :], y, mask=inside)
