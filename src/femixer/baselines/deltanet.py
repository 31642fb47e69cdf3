"""DeltaNet as published: linear attention that writes by the delta rule, behind short convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.convolution import Memory, ShortConvolution
from femixer.baselines.kernels.delta_rule import delta_rule, unit
from femixer.baselines.norm import RMSNorm
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout
from femixer.options import check


class DeltaNet(Baseline):
    """y_t = RMSNorm(S_tᵀ q_t) W_o per head, with

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ,    beta_t = sigmoid(x_t W_beta) per head

    [q, k, v] = silu(conv(x W)), q and k divided by their length in every head of E = dim / heads channels.
    4 dim² parameters, and dim (heads + 3 conv_width).
    Yang et al. 2024, arXiv 2406.06484, after Schlag et al. 2021, arXiv 2102.11174.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        conv_width: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(isinstance(conv_width, int) and conv_width >= 1, "conv_width", conv_width, "a positive integer")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 3 * dim + heads, bias=bias, **made)
        self.convolution = ShortConvolution(3 * dim, conv_width, **made)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        recent, state = (None, None) if memory is None else memory
        qkv, logits = self.in_proj(x).split((3 * self.dim, self.heads), -1)
        qkv, recent = self.convolution(qkv, layout, recent)
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        with without_autocast(x.device):
            q, k, v = F.silu(qkv.to(dtype)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            beta = torch.sigmoid(logits.to(dtype))[..., None]
            q, k = unit(q), unit(k)
            read, state = delta_rule(q, k, beta * v, beta * k, None, None, layout.marks(), state)
            y = self.norm(read).flatten(2)
        return self.out_proj(self.dropout(y.to(x.dtype))), Memory(recent, state) if keep else None
