"""The one block of all models, x + drop(mixer(norm(x))), then x + drop(mlp(norm(x))), and its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from femixer.kernels.rms_norm import rms_norm


class RMSNorm(nn.RMSNorm):
    """torch's, by the operator."""

    def forward(self, x: Tensor) -> Tensor:
        if self.eps is None or self.weight is None:
            return super().forward(x)
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """(silu(x W_gate) * x W_up) W_down"""

    def __init__(self, dim: int, width: int, **made: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False, **made)
        self.up_proj = nn.Linear(dim, width, bias=False, **made)
        self.down_proj = nn.Linear(width, dim, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GELUMLP(nn.Module):
    """gelu(x W_up + b_up) W_down + b_down"""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class FEMBlock(GradientCheckpointingLayer):
    """Pre-norm block around any mixer with FreeEnergyMixer's signature.

    norm(dim, eps=eps) and mlp(dim, width) make its other parts. drop: what happens to both branches before they are
    added, such as dropout.
    """

    def __init__(
        self,
        dim: int,
        mixer: nn.Module,
        width: int,
        eps: float,
        layer: int,
        *,
        norm: Callable[..., nn.Module] = RMSNorm,
        mlp: Callable[[int, int], nn.Module] = SwiGLU,
        drop: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = norm(dim, eps=eps)
        self.mixer = mixer
        self.mlp_norm = norm(dim, eps=eps)
        self.mlp = mlp(dim, width)
        self.drop = nn.Identity() if drop is None else drop

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        past_key_values: Any = None,
        read: slice | None = None,
    ) -> Tensor:
        """x [B, T, dim]; mask, segments as for the mixer; past_key_values: an FEMCache, which then holds the state;
        read: which positions to return, all by default."""
        normed = self.mixer_norm(x)
        if past_key_values is None:
            mixed = self.mixer(normed, mask=mask, segments=segments)
        else:
            before = past_key_values.states[self.layer]
            mixed, after = self.mixer(normed, mask=mask, segments=segments, state=before, return_state=True)
            past_key_values.states[self.layer] = after
        if read is not None:
            x, mixed = x[:, read], mixed[:, read]
        x = x + self.drop(mixed)
        return x + self.drop(self.mlp(self.mlp_norm(x)))
