"""The angles of rotary positions by their definition, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def forward(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
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
