"""RetNet's retention: linear attention with one fixed decay per head and rotary positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, HeadNorm
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout
from femixer.options import check
from femixer.rotary import Rotation, check_base, rotated


class RetNet(Baseline):
    """y_t = [GroupNorm(S_tᵀ R_t q_t / sqrt(E)) * silu(x_t W_g)] W_o per head h, with

        S_t = (1 - 2^(-5-h)) S_{t-1} + (R_t k_t) v_tᵀ,    R_t: rotation by the token's position

    Values have expand * dim channels in all, queries and keys half as many (rounded up to even heads), the published
    ratio. 4 expand dim² parameters: 4 dim² by default; published is expand=2, with a feed-forward layer half as wide.
    The publication's other normalizations of the scores cancel in the norm. Sun et al. 2023, arXiv 2307.08621.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        expand: float = 1.0,
        rope_base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(round(expand * dim / heads) >= 1, "expand", expand, "a positive factor of dim / heads channels")
        check_base(rope_base)
        self.rope_base = rope_base
        value = heads * round(expand * dim / heads)
        self.width = 2 * -(-value // (4 * heads))
        self.widths = (heads * self.width, heads * self.width, value, value)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.norm = HeadNorm(heads, value, eps=1e-5, **made)
        self.out_proj = nn.Linear(value, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v, g = self.in_proj(x).split(self.widths, -1)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            q, k = rotated(q, k, Rotation(layout.position, self.width, self.rope_base), dtype)
            head = torch.arange(self.heads, dtype=torch.float64, device=x.device)
            gate = torch.log1p(-(2.0 ** (-5 - head))).expand(1, x.shape[1], -1)
            v = v.unflatten(-1, (self.heads, -1))
            read, state = linear_attention(q * self.width**-0.5, k, v, gate, layout.marks(), memory, keep=keep)
            y = self.norm(read) * F.silu(g.to(dtype))
        return self.out_proj(self.dropout(y.to(x.dtype))), state
