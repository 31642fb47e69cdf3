"""The angles of rotary positions: token at position p rotates pair i of `width` channels by p base^(-2 i / width)."""

from __future__ import annotations

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
