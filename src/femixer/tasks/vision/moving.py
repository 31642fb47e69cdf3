"""Small shifts and turns of a whole batch: what pictures of few pixels can bear."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F


def move(pixels: Tensor, shift: float, turn: float, generator: Generator) -> Tensor:
    """pixels [B, C, H, W] in [0, 1], each shifted by up to `shift` pixels and turned by up to `turn` degrees, bilinear.

    What comes into view is 0.
    """
    if shift == 0 and turn == 0:
        return pixels
    count, _, height, width = pixels.shape
    drawn = 2 * torch.rand(count, 3, generator=generator) - 1
    angle = drawn[:, 0] * math.radians(turn)
    cos, sin = angle.cos(), angle.sin()
    across, down = drawn[:, 1] * shift * 2 / width, drawn[:, 2] * shift * 2 / height  # a side is 2 long here
    rows = [torch.stack([cos, -sin * height / width, across], -1), torch.stack([sin * width / height, cos, down], -1)]
    grid = F.affine_grid(torch.stack(rows, 1), [*pixels.shape], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
