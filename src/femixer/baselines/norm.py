"""Norms of what a mixer read, in the read's own precision: float32 also where the weights are bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class HeadNorm(nn.GroupNorm):
    """(x - mean) / std * weight + bias with mean and std per token and head: x [B, T, H, D] -> [B, T, H D]."""

    def forward(self, x: Tensor) -> Tensor:
        # torch.compile has wrong strides for the gradient of other layouts.
        normed = F.layer_norm(x.contiguous(), x.shape[3:], eps=self.eps).flatten(2)
        return torch.addcmul(self.bias.to(x.dtype), normed, self.weight.to(x.dtype))
