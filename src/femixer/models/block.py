"""The one block of all models: x + mixer(norm(x)), then x + SwiGLU(norm(x))."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from femixer.models.norm import RMSNorm


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down"""

    def __init__(self, dim: int, width: int, **made: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False, **made)
        self.up_proj = nn.Linear(dim, width, bias=False, **made)
        self.down_proj = nn.Linear(width, dim, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FEMBlock(GradientCheckpointingLayer):
    """Pre-norm block around any mixer with FreeEnergyMixer's signature."""

    def __init__(self, dim: int, mixer: nn.Module, width: int, eps: float, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = RMSNorm(dim, eps=eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(dim, eps=eps)
        self.mlp = SwiGLU(dim, width)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None, past_key_values: Any = None
    ) -> Tensor:
        """x [B, T, dim]; mask, segments as for the mixer; past_key_values: an FEMCache, which then holds the state."""
        normed = self.mixer_norm(x)
        if past_key_values is None:
            read = self.mixer(normed, mask=mask, segments=segments)
        else:
            before = past_key_values.states[self.layer]
            read, after = self.mixer(normed, mask=mask, segments=segments, state=before, return_state=True)
            past_key_values.states[self.layer] = after
        x = x + read
        return x + self.mlp(self.mlp_norm(x))
