"""The angles of rotary positions from tables that the host computes in float64: a GPU has little float64 or none.

A position may be any number, and asking how large the largest is would stop the GPU. So a position is taken by its
digits to the base 256, p = sum d_n 256^n, each of which has a table of cos and sin, 256 rows of every pair; the angles
of the digits are added by products of complex numbers, within 3e-7. The tables of 4 digits (256 KB at 64 channels) stay
in the cache of the GPU, and do not depend on the length.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from femixer.kernels.triton_launch import launch, size_of

DIGITS, BASE = 4, 256
ELEMENTS = 512


def refuse(position: Tensor, width: int, base: float, dtype: torch.dtype) -> str | None:
    if position.dtype not in (torch.int64, torch.int32) or dtype != torch.float32:
        return f"it makes float32 of integers, not {dtype} of {position.dtype}"
    return None


def forward(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    pairs = width // 2
    cos, sin = (torch.empty(*position.shape, pairs, dtype=dtype, device=position.device) for _ in range(2))
    table = _table(position.device, pairs, base)
    columns = triton.next_power_of_2(pairs)
    rows = max(1, ELEMENTS // columns)
    count = position.numel()
    launch(
        _forward,
        (triton.cdiv(count, rows),),
        position.contiguous(),
        table,
        cos,
        sin,
        count,
        moved=size_of(position, cos, sin),
        PAIRS=pairs,
        COLUMNS=columns,
        ROWS=rows,
        DIGITS=DIGITS,
        num_warps=4,
    )
    return cos, sin


@functools.lru_cache(maxsize=64)
def _table(device: torch.device, pairs: int, base: float) -> Tensor:
    """[DIGITS, 256, 2, pairs]: cos and sin of d 256^n base^(-i / pairs)."""
    # Made inside inference mode, it could not be used with gradients later.
    with torch.inference_mode(False):
        if device.type == "meta":
            return torch.empty(DIGITS, BASE, 2, pairs, device=device)
        frequency = torch.logspace(0, 1 / pairs - 1, pairs, base, dtype=torch.float64, device="cpu")
        digit = torch.arange(BASE, dtype=torch.float64, device="cpu")
        place = float(BASE) ** torch.arange(DIGITS, dtype=torch.float64, device="cpu")
        angle = (place[:, None] * digit)[..., None] * frequency
        return torch.stack([angle.cos(), angle.sin()], 2).to(torch.float32).to(device)


@triton.jit(do_not_specialize=["count"])
def _forward(
    Position, Table, Cos, Sin, count,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """cos(a + b) = cos a cos b - sin a sin b, sin(a + b) = sin a cos b + cos a sin b."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < PAIRS)[None, :]
    position = tl.load(Position + row, mask=row < count, other=0)
    cos = tl.full([ROWS, COLUMNS], 1.0, tl.float32)
    sin = tl.zeros([ROWS, COLUMNS], tl.float32)
    for n in tl.static_range(DIGITS):
        digit = ((position >> (8 * n)) & 255).to(tl.int32)
        place = Table + (digit + n * 256)[:, None] * (2 * PAIRS) + column[None, :]
        c, s = tl.load(place, mask=inside, other=0), tl.load(place + PAIRS, mask=inside, other=0)
        cos, sin = cos * c - sin * s, sin * c + cos * s
    out = row.to(tl.int64)[:, None] * PAIRS + column[None, :]
    tl.store(Cos + out, cos, mask=inside)
    tl.store(Sin + out, sin, mask=inside)
