"""Gated linear attention as published: decays per key channel, unnormalized, with an output norm and gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, RMSNorm, check_sizes
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout

# Log decays are divided by this: a sigmoid of one half keeps 0.96 of a channel.
CALM = 16.0


class GLA(Baseline):
    """y_t = [RMSNorm(S_tᵀ q_t / sqrt(E)) * silu(x_t W_g)] W_o per head, with

        S_t = diag(a_t) S_{t-1} + k_t v_tᵀ,    a_t = sigmoid(x_t W_1 W_2 + b)^(1/16) per key channel

    Keys have E = dim / (2 heads) channels, values dim / heads, as published; rank: that of the decays' map.
    4 dim² parameters, and dim (3 rank / 2) for the decays. Yang et al. 2023, arXiv 2312.06635.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        rank: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check_sizes(rank=rank)
        self.width = -(-dim // (2 * heads))
        keys = heads * self.width
        self.widths = (keys, keys, dim, dim, rank)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.decay_proj = nn.Linear(rank, keys, **made)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v, g, low = self.in_proj(x).split(self.widths, -1)
        logits = self.decay_proj(low)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            q, gate = q.to(dtype) * self.width**-0.5, F.logsigmoid(logits.to(dtype)) / CALM
            q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v, gate))
            read, state = linear_attention(q, k, v, gate, layout.marks(), memory, keep=keep)
            y = self.norm(read).flatten(2) * F.silu(g.to(dtype))
        return self.out_proj(self.dropout(y.to(x.dtype))), state
