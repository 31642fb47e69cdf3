"""The angles of rotary positions: token at position p rotates pair i of `width` channels by p base^(-2 i / width)."""

from __future__ import annotations

import functools
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


# There the angles are computed on the host.
WITHOUT_FLOAT64 = ("mps",)
# On a CPU the angles of one sequence, or of one token of each, are kept: the layers of a model ask for the same, and
# without that a decoded token takes 4 to 7 % longer. How many are kept of one sequence, and of how many.
ANGLES, KEPT = 2**16, 32


def forward(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """In torch's operations."""
    count = position.numel()
    alone = count == max(position.shape, default=1) and count * width <= 2 * ANGLES
    if alone and _may_be_read(position):
        return _kept(position.shape, tuple(position.flatten().tolist()), width, base, dtype)
    return _angles(position, width, base, dtype)


def _may_be_read(x: Tensor) -> bool:
    """Whether its numbers are at hand and nobody follows what is done with it: no compiler, transform or tracer."""
    if x.device.type != "cpu" or type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active() and torch._C._get_tracing_state() is None


@functools.lru_cache(maxsize=KEPT)
def _kept(
    shape: torch.Size, positions: tuple[int, ...], width: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    # Made inside inference mode, they could not be kept for gradients later.
    with torch.inference_mode(False):
        return _angles(torch.tensor(positions, device="cpu").view(shape), width, base, dtype)


def _angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    place = torch.device("cpu") if position.device.type in WITHOUT_FLOAT64 else position.device
    pairs = width // 2
    # base^0, base^(-1 / pairs), ..., base^(-(pairs - 1) / pairs)
    frequency = torch.logspace(0, 1 / pairs - 1, pairs, base, dtype=torch.float64, device=place)
    angle = position.to(place)[..., None] * frequency
    return angle.cos().to(position.device, dtype), angle.sin().to(position.device, dtype)


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
