"""Linear attention that writes by the delta rule, as published: DeltaNet; Gated DeltaNet, with Mamba2's decay;
Kimi delta attention, with a decay for every key channel.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import (
    Baseline,
    Common,
    Memory,
    RMSNorm,
    ShortConvolution,
    check_sizes,
    random_steps_,
)
from femixer.baselines.kernels.chunks import delta_rule, unit
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout
from femixer.options import check


class DeltaNet(Baseline):
    """y_t = RMSNorm(S_tᵀ q_t) W_o per head, with

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ,    beta_t = sigmoid(x_t W_beta) per head

    [q, k, v] = silu(conv(x W)), q and k divided by their length in every head of E = dim / heads channels.
    4 dim² parameters, and dim (heads + 3 conv_width).
    Yang et al. 2024, arXiv 2406.06484, after Schlag et al. 2021, arXiv 2102.11174.
    """

    def __init__(self, dim: int, heads: int, *, conv_width: int = 4, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        check_sizes(conv_width=conv_width)
        self.in_proj = self.linear(dim, 3 * dim + heads)
        self.convolution = ShortConvolution(3 * dim, conv_width, **self.factory_kwargs)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
        return y.to(x.dtype), Memory(recent, state) if keep else None


# As published: rates A start below this; those of Gated DeltaNet anywhere above zero, but not at it, KDA's above one.
FASTEST, SLOWEST = 16.0, 1.0


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
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        conv_width: int = 4,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        check_sizes(conv_width=conv_width)
        for name, factor in (("expand_k", expand_k), ("expand_v", expand_v)):
            check(factor > 0, name, factor, "a positive factor of dim / heads channels")
        keys, values = (heads * max(1, round(factor * dim / heads)) for factor in (expand_k, expand_v))
        self.streams = (keys, keys, values)
        self.widths = (sum(self.streams), values, heads, heads)
        self.in_proj = self.linear(dim, sum(self.widths))
        self.convolution = ShortConvolution(sum(self.streams), conv_width, **self.factory_kwargs)
        self.step_bias = self.empty(heads)
        self.log_rate = self.empty(heads)  # A = exp(log_rate)
        self.norm = RMSNorm(values // heads, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(values, dim)
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
        return y.to(x.dtype), Memory(recent, state) if keep else None


class KDA(Baseline):
    """y_t = [RMSNorm(S_tᵀ q_t) * sigmoid(x_t W_1 W_2 + b)] W_o per head, with

        S_t = (1 - beta_t k_t k_tᵀ) diag(alpha_t) S_{t-1} + beta_t k_t v_tᵀ
        alpha_t = exp(-A softplus(x_t W_3 W_4 + bias)) per key channel, A per head;    beta_t = sigmoid(x_t W_beta)

    [q, k, v] = silu(conv(x W)), q and k divided by their length in every head; keys and values have dim / heads
    channels. rank: of both low-rank maps, published as a head's 128 channels at dim 2048, so dim / 16 by default.
    4 dim² parameters, and dim (4 rank + heads + 3 conv_width) more. Kimi Team 2025, arXiv 2510.26692.
    """

    def __init__(
        self, dim: int, heads: int, *, rank: int | None = None, conv_width: int = 4, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        rank = max(1, dim // 16) if rank is None else rank
        check_sizes(rank=rank, conv_width=conv_width)
        self.widths = (3 * dim, heads, rank, rank)
        self.in_proj = self.linear(dim, sum(self.widths))
        self.convolution = ShortConvolution(3 * dim, conv_width, **self.factory_kwargs)
        self.decay_proj = self.linear(rank, dim, bias=False)
        self.gate_proj = self.linear(rank, dim, bias=True)
        self.step_bias = self.empty(dim)
        self.log_rate = self.empty(heads)  # A = exp(log_rate)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
        return y.to(x.dtype), Memory(recent, state) if keep else None
