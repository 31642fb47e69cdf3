"""The scaled softplus in torch's operations."""

import torch
import torch.nn.functional as F
from torch import Tensor

DIFFERENTIABLE = True


def forward(x: Tensor, bias: Tensor | None, scale: float, floor: float) -> tuple[Tensor, ...]:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = F.softplus(y if bias is None else y + bias.to(y.dtype))
    y = y if scale == 1 else scale * y
    return (y if floor == 0 else y + floor,)
