"""RWKV-6 (Finch) time mixing: decays per channel and token shifts that both depend on the input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.convolution import Memory, token_before
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.baselines.norm import HeadNorm
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout
from femixer.options import check

# What the shifted tokens are for: decay, key, value, receptance, gate.
USES = 5


class RWKV6(Baseline):
    """y_t = [GroupNorm(S_{t-1}ᵀ r_t + <r_t, u * k_t> v_t) * silu(g_t)] W_o per head, with

        S_t = diag(w_t) S_{t-1} + k_t v_tᵀ,    w_t = exp(-exp(d + tanh(x^w_t D_1) D_2)) per key channel

    r, k, v, g and w are projections of the token between itself and the one before, each at a place of its own:

        x^j_t = x_t + (x_{t-1} - x_t) * (m_j + tanh((x_t + (x_{t-1} - x_t) * m) A_j) B_j)

    Receptance and keys have expand_k * dim channels: published is 1 with 5 dim² parameters; one half, as in
    flash-linear-attention, makes it 4 dim². rank: that of A and B, twice that for D; published are 32 and 64 for widths
    of 1024 and more, here dim / 32 below, at least 4. Shifts, decays and bonus u start as in the publication's first
    layer. Peng et al. 2024, arXiv 2404.05892.
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
        rank: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        rank = max(4, min(32, dim // 32)) if rank is None else rank
        check(isinstance(rank, int) and rank >= 1, "rank", rank, "a positive integer")
        check(expand_k > 0, "expand_k", expand_k, "a positive factor of dim / heads channels")
        self.width, value = max(1, round(expand_k * dim / heads)), dim // heads
        keys = heads * self.width
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shift = nn.Parameter(torch.empty(dim, **made))  # m
        self.shifts = nn.Parameter(torch.empty(USES, dim, **made))  # m_j
        self.shift_down = nn.Parameter(torch.empty(USES * rank, dim, **made))  # A
        self.shift_up = nn.Parameter(torch.empty(USES, rank, dim, **made))  # B
        self.decay_bias = nn.Parameter(torch.empty(keys, **made))  # d
        self.decay_down = nn.Parameter(torch.empty(2 * rank, dim, **made))  # D_1
        self.decay_up = nn.Parameter(torch.empty(keys, 2 * rank, **made))  # D_2
        self.bonus = nn.Parameter(torch.empty(heads, self.width, **made))  # u
        self.key_proj = nn.Linear(dim, keys, bias=bias, **made)
        self.value_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.receptance_proj = nn.Linear(dim, keys, bias=bias, **made)
        self.gate_proj = nn.Linear(dim, dim, bias=bias, **made)
        # The published 64e-5 is for heads of 64 channels.
        self.norm = HeadNorm(heads, dim, eps=1e-5 * value, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            channel = torch.arange(self.dim, dtype=torch.float64, device=self.shift.device) / self.dim
            self.shift.copy_(1 - channel)
            self.shifts.copy_(1 - channel ** torch.tensor([1, 1, 1, 0.5, 0.5], device=channel.device)[:, None])
            key = torch.arange(self.decay_bias.numel(), dtype=torch.float64, device=channel.device)
            self.decay_bias.copy_(-6 + 5 * (key / max(1, len(key) - 1)) ** 0.7)
            self.bonus.copy_(0.1 * ((key + 1) % 3 - 1).view_as(self.bonus))
        for down, up in ((self.shift_down, self.shift_up), (self.decay_down, self.decay_up)):
            nn.init.zeros_(down)
            nn.init.uniform_(up, -0.01, 0.01)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        recent, state = (None, None) if memory is None else memory
        before, recent = token_before(x, layout, recent)
        for_decay, for_key, for_value, for_receptance, for_gate = self._shifted(x, before - x)
        low = torch.tanh(F.linear(for_decay, self.decay_down.to(x.dtype)))
        logits = F.linear(low, self.decay_up.to(x.dtype))
        r, k, v = self.receptance_proj(for_receptance), self.key_proj(for_key), self.value_proj(for_value)
        g = self.gate_proj(for_gate)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            gate = -(logits.to(dtype) + self.decay_bias.to(dtype)).exp()
            r, k, v, gate = (part.to(dtype).unflatten(-1, (self.heads, -1)) for part in (r, k, v, gate))
            read, state = linear_attention(r, k, v, gate, layout.marks(), state, exclusive=True, keep=keep)
            read = read + (r * self.bonus.to(dtype) * k).sum(-1, keepdim=True) * v
            y = self.norm(read) * F.silu(g.to(dtype))
        y = self.out_proj(self.dropout(y.to(x.dtype)))
        return y, None if state is None else Memory(recent, state)

    def _shifted(self, x: Tensor, back: Tensor) -> list[Tensor]:
        """x^j [B, T, dim] for each use; back: the way to the token before."""
        low = torch.tanh(F.linear(torch.addcmul(x, back, self.shift.to(x.dtype)), self.shift_down.to(x.dtype)))
        parts = zip(low.chunk(USES, -1), self.shift_up.to(x.dtype), self.shifts.to(x.dtype), strict=True)
        return [torch.addcmul(x, back, shift + part @ up) for part, up, shift in parts]
