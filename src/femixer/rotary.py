"""Rotary positions: a rotation of each pair of channels by an angle proportional to the position.

Positions are those in a sequence or, inside `on_grid`, rows and columns of an image.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.rotary import rotate
from femixer.kernels.rotary_angles import rotary_angles


class Grid(NamedTuple):
    """The last rows * columns tokens are the patches of an image, row by row."""

    rows: int
    columns: int


class _Here(threading.local):
    """Per thread, so that models running in parallel do not see each other's grids."""

    def __init__(self) -> None:
        self.grid: Grid | None = None  # always set: a compiler's guards need the attribute


_here = _Here()


class on_grid:
    """Context manager: rotary positions are those of an image. Half of the pairs of a head rotate with the row and half
    with the column. Tokens before the patches are not rotated."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __enter__(self) -> None:
        self.outer, _here.grid = _here.grid, self.grid

    def __exit__(self, *_: object) -> None:
        _here.grid = self.outer


def check_base(rope_base: float) -> None:
    if isinstance(rope_base, bool) or not isinstance(rope_base, (int, float)) or not 0 < rope_base < math.inf:
        raise ValueError(f"rope_base={rope_base!r} must be a positive number")


class Rotation(NamedTuple):
    """How a prior rotates its queries and keys: positions [B or 1, T], channels per head, base of the frequencies. With
    a floor the result becomes features max(., 0) + floor."""

    position: Tensor
    width: int
    base: float
    floor: float | None = None

    def angles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [B or 1, T, width / 2]: pair i rotates by position * base^(-2 i / width)."""
        grid = _here.grid
        if grid is None:
            return rotary_angles(self.position, self.width, self.base, dtype)
        return grid_angles(grid, self.position, self.width, self.base, dtype)


def rotated(q: Tensor, k: Tensor, rotation: Rotation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q [B, T, H E] and k [B, T, G E] split into heads [B, T, H, E] and [B, T, G, E] and rotated. Scores <q, k> then
    depend on positions only through their distance; products of features (with a floor) do not have this property.

    Computed at least in float32, returned in `dtype`.
    """
    q, k = (x.to(dtype).unflatten(-1, (-1, rotation.width)) for x in (q, k))
    cos, sin = rotation.angles(torch.promote_types(dtype, torch.float32))
    return rotate(q, k, cos, sin, rotation.floor)


def grid_angles(grid: Grid, position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rotary_angles` on a grid: the first half of the pairs rotates with the row, the second with the column, at the
    same frequencies."""
    if width % 4:
        raise ValueError(f"queries and keys have {width} channels; rotary positions in an image need a multiple of 4")
    place = (position - (position.shape[-1] - grid.rows * grid.columns)).clamp_min(0)
    axes = (place // grid.columns, place % grid.columns)
    (row_cos, row_sin), (cos, sin) = (rotary_angles(axis, width // 2, base, dtype) for axis in axes)
    return torch.cat([row_cos, cos], -1), torch.cat([row_sin, sin], -1)
