"""From an image to tokens: its patches, a class token in front of them and learned positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.vision.config import FEMVisionConfig
from femixer.rotary import Grid


class Embedded(NamedTuple):
    """Tokens [B, T, dim] of images with so many patches; a class token, if there is one, is the first."""

    tokens: Tensor
    grid: Grid


class PatchEmbedding(nn.Module):
    """Images [B, C, H, W] -> tokens [B, T, dim], the patches in the order of reading."""

    def __init__(self, config: FEMVisionConfig) -> None:
        super().__init__()
        dim, patch = config.hidden_size, config.patch_size
        self.channels, self.patch, self.side = config.num_channels, patch, config.patches
        self.projection = nn.Conv2d(config.num_channels, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if config.pooling == "token" else None
        self.positions: nn.Parameter | None = None
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(1, self.prefix + self.side**2, dim))
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return int(self.class_token is not None)

    def reset_parameters(self) -> None:
        for parameter in (self.class_token, self.positions):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, pixel_values: Tensor) -> Embedded:
        self.check(pixel_values)
        x = self.projection(pixel_values.to(self.projection.weight.dtype))
        grid = Grid(*x.shape[2:])
        x = x.flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], 1)
        if self.positions is not None:
            x = x + self.positions_for(grid)
        return Embedded(self.dropout(x), grid)

    def positions_for(self, grid: Grid) -> Tensor:
        """Learned positions [1, T, dim] of a grid, bicubic between those of the training images; the class token's is
        no place in the image and stays."""
        assert self.positions is not None
        if grid == (self.side, self.side):
            return self.positions
        prefix, patches = self.positions.split([self.prefix, self.side**2], 1)
        square = patches.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        wide = torch.promote_types(square.dtype, torch.float32)
        resized = F.interpolate(square.to(wide), grid, mode="bicubic", antialias=True).to(square.dtype)
        return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], 1)

    def check(self, pixel_values: Tensor) -> None:
        """Raise an error that names what does not fit, and what would."""
        if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
            found = getattr(pixel_values, "dtype", type(pixel_values).__name__)
            raise TypeError(f"pixel_values must be a floating-point tensor, not {found}")
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] != self.channels or shape[0] == 0:
            allowed = f"[images, {self.channels}, height, width] with at least one image"
            raise ValueError(f"pixel_values has shape {shape}; allowed is {allowed}")
        for side, pixels in (("height", shape[2]), ("width", shape[3])):
            if pixels == 0 or pixels % self.patch:
                raise ValueError(
                    f"pixel_values has {side} {pixels}, which is no multiple of patch_size={self.patch}: "
                    f"the image must be resized or padded"
                )
