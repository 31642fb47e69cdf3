"""RMS norm by torch's own."""

import torch.nn.functional as F
from torch import Tensor

DIFFERENTIABLE = True


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return (F.rms_norm(x, weight.shape, weight, eps),)
