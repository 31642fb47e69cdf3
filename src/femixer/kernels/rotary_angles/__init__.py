"""The angles of rotary positions: token at position p rotates pair i of `width` channels by p base^(-2 i / width)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import declared


# Not fusible: a compiler that sees inside computes the sines again for every head.
@declared(outputs=2)
def rotary_angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., width / 2] of the angles at positions [...].

    The angles themselves are float64: float32 ones are off by 2e-4 at position 16383 and by 0.02 at a million.
    """
    shape = (*position.shape, width // 2)
    return position.new_empty(shape, dtype=dtype), position.new_empty(shape, dtype=dtype)


OPERATOR = rotary_angles.operator


def definition(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The formula in float64."""
    angles = [[p * base ** (-2 * i / width) for i in range(width // 2)] for p in position.flatten().tolist()]
    cos, sin = ([[f(angle) for angle in row] for row in angles] for f in (math.cos, math.sin))
    shape = (*position.shape, width // 2)
    return tuple(torch.tensor(x, dtype=torch.float64).view(shape) for x in (cos, sin))


def examples() -> dict[str, tuple[Any, ...]]:
    near, far = torch.arange(13)[None], torch.tensor([[0, 16_383], [1_000_000, 7]])
    return {
        "near": (near, 10, 10000.0, torch.float32),
        "far": (far, 64, 10000.0, torch.float32),
        "float64": (far, 6, 100.0, torch.float64),
        "one token": (far[:, 1:], 64, 10000.0, torch.float32),
        "no token": (far[:, :0], 6, 100.0, torch.float32),
    }
