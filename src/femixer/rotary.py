"""Rotary positions: a rotation of each pair of channels by an angle proportional to the position.

Tokens stand in a line, or, inside of `on_grid`, in the rows and columns of an image.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femixer.kernels.backend import array, eager_kernels, memory, native, one_token
from femixer.kernels.function import run


class Grid(NamedTuple):
    """The last rows * columns tokens are the patches of an image, row by row."""

    rows: int
    columns: int


class _Here(threading.local):
    """Per thread, so that models which run side by side do not see each other's images."""

    def __init__(self) -> None:
        self.grid: Grid | None = None  # set from the start: a compiler's guards look at what is there


_here = _Here()


class on_grid:
    """Inside, rotary positions are those of an image: half of the pairs of a head turn with the row and half with the
    column. Tokens in front of the patches do not turn."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __enter__(self) -> None:
        self.outer, _here.grid = _here.grid, self.grid

    def __exit__(self, *_: object) -> None:
        _here.grid = self.outer


def check_base(rope_base: float) -> None:
    if isinstance(rope_base, bool) or not isinstance(rope_base, (int, float)) or not 0 < rope_base < math.inf:
        raise ValueError(f"rope_base={rope_base!r} must be a positive number")


class Turn(NamedTuple):
    """How a prior turns its queries and keys: the arguments of `rotated`."""

    position: Tensor
    width: int
    base: float
    floor: float | None = None

    def angles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [B or 1, T, 1, width / 2]"""
        grid = _here.grid
        if grid is None:
            return rotary_angles(self.position, self.width, self.base, dtype)
        return grid_angles(grid, self.position, self.width, self.base, dtype)


def rotated(q: Tensor, k: Tensor, turn: Turn, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q [B, T, H E] and k [B, T, G E] at their positions [B or 1, T], as heads [B, T, H, E] and [B, T, G, E]; with a
    floor as features max(., 0) + floor. Heads that are turned already (`modulate_and_turn`) are given back.

    Rotated in float32 at least, returned in `dtype`.
    """
    if q.dim() == 4:
        return q, k
    if _here.grid is None and dtype == torch.float32 and one_token(q):
        return tuple(_floored(_rotate_token(x, turn), turn.floor) for x in (q, k))  # type: ignore[return-value]
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = turn.angles(wide)
    q, k = (x.unflatten(-1, (-1, turn.width)) for x in (q, k))
    if turn.floor is not None and q.dtype == k.dtype == dtype and eager_kernels(q) and eager_kernels(k):
        return run(Features, q, cos, sin, turn.floor), run(Features, k, cos, sin, turn.floor)
    return tuple(_floored(rotate(x.to(wide), cos, sin).to(dtype), turn.floor) for x in (q, k))  # type: ignore[return-value]


def modulate_and_turn(x: Tensor, etas: Iterable[tuple[slice, Tensor]], scaled: int, turn: Turn) -> None:
    """x [B, T, width] in place, float32: heads in the first `scaled` columns, times 1 + eta, are turned; others plus
    eta. etas: of stretches of all tokens."""
    cos, sin = _pairs(*turn.angles(x.dtype))
    rows, floor = x.flatten(0, 1), -1.0 if turn.floor is None else turn.floor
    for at, eta in etas:
        native("rotary").modulate(array(rows[at]), array(eta), at.start, scaled, cos, sin, floor)


def _floored(x: Tensor, floor: float | None) -> Tensor:
    return x if floor is None else x.relu() + floor


class Features(torch.autograd.Function):
    """max(`rotate`, 0) + floor as one compiled kernel each way."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, floor: float) -> Tensor:
        out = x.new_empty(x.shape)
        native("rotary").forward(*memory(x, out), tuple(x.shape), *_pairs(cos, sin), floor)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.floor = inputs
        ctx.save_for_backward(cos, sin, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, features = ctx.saved_tensors
        out = grad.new_empty(grad.shape)
        native("rotary").backward(*memory(grad, features, out), tuple(grad.shape), *_pairs(cos, sin), ctx.floor)
        return out, None, None, None


def _pairs(cos: Tensor, sin: Tensor) -> tuple[Any, Any]:
    return array(cos[:, :, 0]), array(sin[:, :, 0])


def _rotate_token(x: Tensor, turn: Turn) -> Tensor:
    position, width, base, _ = turn
    batch, heads = x.shape[0], x.shape[2] // width
    out = x.new_empty(batch, 1, heads, width)
    rows = x.contiguous().view(batch, -1).numpy()
    native("token").rotate(rows, heads, position.numpy(), base, out.view(batch, heads, width).numpy())
    return out


def rotary_angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, 1, width/2] for positions [..., T].

    The angles are float64: float32 ones are off by 2e-4 at position 16383 and by 0.02 at a million.
    """
    # A compiler that sees inside fuses the sines into the rotation and computes them again for every head.
    return (_opaque if torch.compiler.is_compiling() else _angles)(position, width, base, dtype)


def grid_angles(grid: Grid, position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same on a grid: the first half of the pairs turn with the row, the second at the same speeds with the
    column."""
    if width % 4:
        raise ValueError(f"queries and keys have {width} channels; rotary positions in an image need a multiple of 4")
    place = (position - (position.shape[-1] - grid.rows * grid.columns)).clamp_min(0)
    axes = (place // grid.columns, place % grid.columns)
    (row_cos, row_sin), (cos, sin) = (rotary_angles(axis, width // 2, base, dtype) for axis in axes)
    return torch.cat([row_cos, cos], -1), torch.cat([row_sin, sin], -1)


def _angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width
    angle = position[..., None, None].to(torch.float64) * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


@torch.library.custom_op("femixer::rotary_angles", mutates_args=())
def _opaque(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _angles(position, width, base, dtype)


@_opaque.register_fake
def _(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*position.shape, 1, width // 2)
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, E]: channels (2i, 2i + 1) are rotated as pair i, so scores depend on the distance only."""
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # a compiler fuses the real form and knows no complex numbers
        a, b = pairs.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    if any(step % 2 for step in (*pairs.stride()[:-1], pairs.storage_offset())):
        pairs = pairs.clone(memory_format=torch.contiguous_format)  # complex numbers lie at even places
    # One complex product; several times faster than the real form written out.
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)).flatten(-2)
