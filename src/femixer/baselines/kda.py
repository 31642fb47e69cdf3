"""Kimi delta attention as published: the gated delta rule with a decay for every key channel."""

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

# As published: rates A start between these.
SLOWEST, FASTEST = 1.0, 16.0


class KDA(Baseline):
    """y_t = [RMSNorm(S_tᵀ q_t) * sigmoid(x_t W_1 W_2 + b)] W_o per head, with

        S_t = (1 - beta_t k_t k_tᵀ) diag(alpha_t) S_{t-1} + beta_t k_t v_tᵀ
        alpha_t = exp(-A softplus(x_t W_3 W_4 + bias)) per key channel, A per head;    beta_t = sigmoid(x_t W_beta)

    [q, k, v] = silu(conv(x W)), q and k divided by their length in every head; keys and values have dim / heads
    channels. rank: of both low-rank maps, published as a head's 128 channels at dim 2048, so dim / 16 by default.
    4 dim² parameters, and dim (4 rank + heads + 3 conv_width) more. Kimi Team 2025, arXiv 2510.26692.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        rank: int | None = None,
        conv_width: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        rank = max(1, dim // 16) if rank is None else rank
        for name, size in (("rank", rank), ("conv_width", conv_width)):
            check(isinstance(size, int) and size >= 1, name, size, "a positive integer")
        self.widths = (3 * dim, heads, rank, rank)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.convolution = ShortConvolution(3 * dim, conv_width, **made)
        self.decay_proj = nn.Linear(rank, dim, bias=False, **made)
        self.gate_proj = nn.Linear(rank, dim, **made)
        self.step_bias = nn.Parameter(torch.empty(dim, **made))
        self.log_rate = nn.Parameter(torch.empty(heads, **made))  # A = exp(log_rate)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.step_bias)
        with torch.no_grad():
            self.log_rate.copy_(torch.empty_like(self.log_rate).uniform_(SLOWEST, FASTEST).log())

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        recent, state = (None, None) if memory is None else memory
        qkv, beta, decay, gate = self.in_proj(x).split(self.widths, -1)
        qkv, recent = self.convolution(qkv, layout, recent)
        decay, gate = self.decay_proj(decay), self.gate_proj(gate)
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        with without_autocast(x.device):
            q, k, v = F.silu(qkv.to(dtype)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            steps = F.softplus(decay.to(dtype) + self.step_bias.to(dtype)).unflatten(-1, (self.heads, -1))
            alpha = -self.log_rate.to(dtype).exp()[:, None] * steps
            beta = torch.sigmoid(beta.to(dtype))[..., None]
            q, k = unit(q), unit(k)
            read, state = delta_rule(q, k, beta * v, beta * k, None, alpha, layout.marks(), state, steep=True)
            y = self.norm(read).flatten(2) * torch.sigmoid(gate.to(dtype))
        return self.out_proj(self.dropout(y.to(x.dtype))), Memory(recent, state) if keep else None
