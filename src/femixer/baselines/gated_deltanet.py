"""Gated DeltaNet as published: the delta rule on a state that decays as Mamba2's, with an output norm and gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.convolution import Memory, ShortConvolution
from femixer.baselines.kernels.delta_rule import delta_rule, unit
from femixer.baselines.norm import RMSNorm
from femixer.baselines.steps import random_steps_
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout
from femixer.options import check

# As published: rates A start between zero, but not at it, and this.
FASTEST = 16.0


class GatedDeltaNet(Baseline):
    """y_t = [RMSNorm(S_tᵀ q_t) * silu(x_t W_g)] W_o per head, with

        S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}ᵀ k_t)ᵀ
        alpha_t = exp(-A softplus(x_t W_alpha + bias)),    beta_t = sigmoid(x_t W_beta),    one number per head each

    [q, k, v] = silu(conv(x W)), q and k divided by their length in every head. Keys have expand_k * dim channels,
    values and gates expand_v * dim. Published values are twice as wide as keys: that is 4 dim² parameters at the
    default 1/2 and 1, and 6 dim² at the publication's own 3/4 and 3/2; dim (2 heads + 2 conv_width) more by default.
    Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        conv_width: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(isinstance(conv_width, int) and conv_width >= 1, "conv_width", conv_width, "a positive integer")
        for name, factor in (("expand_k", expand_k), ("expand_v", expand_v)):
            check(factor > 0, name, factor, "a positive factor of dim / heads channels")
        keys, values = (heads * max(1, round(factor * dim / heads)) for factor in (expand_k, expand_v))
        self.streams = (keys, keys, values)
        self.widths = (sum(self.streams), values, heads, heads)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.convolution = ShortConvolution(sum(self.streams), conv_width, **made)
        self.step_bias = nn.Parameter(torch.empty(heads, **made))
        self.log_rate = nn.Parameter(torch.empty(heads, **made))  # A = exp(log_rate)
        self.norm = RMSNorm(values // heads, eps=1e-5, **made)
        self.out_proj = nn.Linear(values, dim, bias=bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            random_steps_(self.step_bias)
            self.log_rate.copy_(torch.empty_like(self.log_rate).uniform_(1e-3, FASTEST).log())

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        recent, state = (None, None) if memory is None else memory
        qkv, g, *logits = self.in_proj(x).split(self.widths, -1)
        qkv, recent = self.convolution(qkv, layout, recent)
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        with without_autocast(x.device):
            streams = F.silu(qkv.to(dtype)).split(self.streams, -1)
            q, k, v = (stream.unflatten(-1, (self.heads, -1)) for stream in streams)
            alpha, beta = (part.to(dtype) for part in logits)
            gate = -self.log_rate.to(dtype).exp() * F.softplus(alpha + self.step_bias.to(dtype))
            beta = torch.sigmoid(beta)[..., None]
            q, k = unit(q), unit(k)
            read, state = delta_rule(q, k, beta * v, beta * k, None, gate, layout.marks(), state)
            y = self.norm(read).flatten(2) * F.silu(g.to(dtype))
        return self.out_proj(self.dropout(y.to(x.dtype))), Memory(recent, state) if keep else None
