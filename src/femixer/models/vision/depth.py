"""Stochastic depth (Huang et al., 2016): in training, blocks are skipped at random, image by image."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StochasticDepth(nn.Module):
    """x [B, ...] * keep / P(keep), with one keep per image, 0 with probability `skipped`."""

    def __init__(self, skipped: float) -> None:
        super().__init__()
        self.skipped = skipped

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.skipped == 0:
            return x
        keep = torch.empty(len(x), *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x * keep.bernoulli_(1 - self.skipped).div_(1 - self.skipped)

    def extra_repr(self) -> str:
        return f"skipped={self.skipped}"


def rising(last: float, layers: int) -> list[float]:
    """Chances to be skipped, from 0 at the first layer linearly to `last` at the last."""
    return [last * layer / max(1, layers - 1) for layer in range(layers)]
