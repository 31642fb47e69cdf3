"""The angles of rotary positions in torch's operations."""

import torch
from torch import Tensor

# There the angles are computed on the host.
WITHOUT_FLOAT64 = ("mps",)


def forward(position: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    place = torch.device("cpu") if position.device.type in WITHOUT_FLOAT64 else position.device
    pairs = width // 2
    # base^0, base^(-1 / pairs), ..., base^(-(pairs - 1) / pairs)
    frequency = torch.logspace(0, 1 / pairs - 1, pairs, base, dtype=torch.float64, device=place)
    angle = position.to(place)[..., None] * frequency
    return angle.cos().to(position.device, dtype), angle.sin().to(position.device, dtype)
