"""Rotary positions: a rotation of each pair of channels by an angle proportional to the position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, 1, width/2] for positions [..., T].

    The angles are float64: float32 ones are off by 2e-4 at position 16383 and by 0.02 at a million.
    """
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width
    angle = position[..., None, None].to(torch.float64) * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, E]: channels (i, i + E/2) form the pair i; scores of rotated vectors depend on distance only."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
