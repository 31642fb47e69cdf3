"""Time mixing of RWKV-6 (Finch), with decays per channel and token shifts that both depend on the input, and of RWKV-7
(Goose), a generalized delta rule with decays and learning rates per channel.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, HeadNorm, Memory, check_sizes, token_before
from femixer.baselines.kernels.chunks import delta_rule, unit
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.operator import without_autocast
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
        self, dim: int, heads: int, *, expand_k: float = 0.5, rank: int | None = None, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        rank = max(4, min(32, dim // 32)) if rank is None else rank
        check_sizes(rank=rank)
        check(expand_k > 0, "expand_k", expand_k, "a positive factor of dim / heads channels")
        self.width, value = max(1, round(expand_k * dim / heads)), dim // heads
        keys = heads * self.width
        self.shift = self.empty(dim)  # m
        self.shifts = self.empty(USES, dim)  # m_j
        self.shift_down = self.empty(USES * rank, dim)  # A
        self.shift_up = self.empty(USES, rank, dim)  # B
        self.decay_bias = self.empty(keys)  # d
        self.decay_down = self.empty(2 * rank, dim)  # D_1
        self.decay_up = self.empty(keys, 2 * rank)  # D_2
        self.bonus = self.empty(heads, self.width)  # u
        self.key_proj = self.linear(dim, keys)
        self.value_proj = self.linear(dim, dim)
        self.receptance_proj = self.linear(dim, keys)
        self.gate_proj = self.linear(dim, dim)
        # The published 64e-5 is for heads of 64 channels.
        self.norm = HeadNorm(heads, dim, eps=1e-5 * value, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
            # A token reads the state before it, as the token before would read its own with this one's receptance.
            first = torch.zeros_like(v[:, :1]) if state is None else torch.einsum("bthe,bhed->bthd", r[:, :1], state)
            ahead = F.pad(r[:, 1:], (0, 0, 0, 0, 0, 1))
            read, state = linear_attention(ahead, k, v, gate, layout.marks(), state, keep=keep)
            read = torch.cat([first, read[:, :-1]], 1)
            if layout.starts is not None:
                read = read.masked_fill(layout.starts[..., None, None], 0)
            read = read + (r * self.bonus.to(dtype) * k).sum(-1, keepdim=True) * v
            y = self.norm(read) * F.silu(g.to(dtype))
        return y.to(x.dtype), None if state is None else Memory(recent, state)

    def _shifted(self, x: Tensor, back: Tensor) -> list[Tensor]:
        """x^j [B, T, dim] for each use; back: the way to the token before."""
        low = torch.tanh(F.linear(torch.addcmul(x, back, self.shift.to(x.dtype)), self.shift_down.to(x.dtype)))
        parts = zip(low.chunk(USES, -1), self.shift_up.to(x.dtype), self.shifts.to(x.dtype), strict=True)
        return [torch.addcmul(x, back, shift + part @ up) for part, up, shift in parts]


# No decay is below exp(-FASTEST).
FASTEST = math.exp(-0.5)
# What the shifted tokens are for, and how far towards the token before they start: 1 - (channel / dim)^exponent.
SHIFTS = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}


class RWKV7(Baseline):
    """y_t = [g_t * (GroupNorm(S_tᵀ r_t) + <r_t, rho * k~_t> v_t)] W_o per head of E = dim / heads channels, with

        S_t = (diag(w_t) - (a_t * kappa_t) kappa_tᵀ) S_{t-1} + k~_t v_tᵀ,    w_t = exp(-e^(-1/2) sigmoid(d_t))
        kappa_t = unit(xi * k_t),    k~_t = k_t * (1 + alpha * (a_t - 1))

    r, k, v, d, a, g come from the token between itself and the one before, x_t + (x_{t-1} - x_t) * m_j, each at a place
    of its own: r, k, v by a matrix; d = bias + tanh(x W_1) W_2, a = sigmoid(bias + x A_1 A_2), g = sigmoid(x G_1) G_2
    of low rank. Published ranks are 1.8 sqrt(dim) for d and a, 0.6 dim^0.8 for g, rounded to multiples of 32; here they
    are rounded to integers: 4 dim² parameters and 2 dim for every rank, in all 1.3 times 4 dim² at dim 128 and 1.15
    times at 768. The mixing of the values with those of the model's first layer is left out: a mixer knows no other
    layer. Vectors start as in the reference code's first layer. Peng et al. 2025, arXiv 2503.14456.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        gate_rank: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        small = max(1, round(1.8 * dim**0.5))
        decay_rank = small if decay_rank is None else decay_rank
        rate_rank = small if rate_rank is None else rate_rank
        gate_rank = max(1, round(0.6 * dim**0.8)) if gate_rank is None else gate_rank
        check_sizes(decay_rank=decay_rank, rate_rank=rate_rank, gate_rank=gate_rank)
        self.shifts = self.empty(len(SHIFTS), dim)  # m_j
        self.receptance_proj = self.linear(dim, dim)
        self.key_proj = self.linear(dim, dim)
        self.value_proj = self.linear(dim, dim)
        self.decay_down = self.linear(dim, decay_rank, bias=False)
        self.decay_up = self.linear(decay_rank, dim, bias=True)
        self.rate_down = self.linear(dim, rate_rank, bias=False)
        self.rate_up = self.linear(rate_rank, dim, bias=True)
        self.gate_down = self.linear(dim, gate_rank, bias=False)
        self.gate_up = self.linear(gate_rank, dim, bias=False)
        self.removal = self.empty(dim)  # xi
        self.replacement = self.empty(dim)  # alpha
        self.bonus = self.empty(heads, dim // heads)  # rho
        # The published 64e-5 is for heads of 64 channels.
        self.norm = HeadNorm(heads, dim, eps=1e-5 * (dim // heads), **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.replacement, 1.02)
        nn.init.constant_(self.bonus, -0.04)
        with torch.no_grad():
            channel = torch.arange(self.dim, dtype=torch.float64, device=self.shifts.device)
            for shift, exponent in zip(self.shifts, SHIFTS.values(), strict=True):
                shift.copy_(1 - (channel / self.dim) ** exponent)
            slope, width = channel / max(1, self.dim - 1), self.dim // self.heads
            # From -1 to 1 over the channels of a head, flat in the middle.
            bend = 2 * (channel % width) / max(1, width - 1) - 1
            bend = bend * bend.abs()
            self.removal.copy_(0.76 - 0.1 * slope)
            self.decay_up.bias.copy_(6 * slope - 5.5 + 2.5 * bend)
            self.rate_up.bias.copy_(0.4 * slope - 0.39 + 0.3 * bend)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        recent, state = (None, None) if memory is None else memory
        before, recent = token_before(x, layout, recent)
        back = before - x
        shifted = (torch.addcmul(x, back, shift) for shift in self.shifts.to(x.dtype))
        for_receptance, for_decay, for_key, for_value, for_rate, for_gate = shifted
        r, k, v = self.receptance_proj(for_receptance), self.key_proj(for_key), self.value_proj(for_value)
        decay = self.decay_up(torch.tanh(self.decay_down(for_decay)))
        rate = self.rate_up(self.rate_down(for_rate))
        g = self.gate_up(torch.sigmoid(self.gate_down(for_gate)))
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            gate, a = -FASTEST * torch.sigmoid(decay.to(dtype)), torch.sigmoid(rate.to(dtype))
            removed = k.to(dtype) * self.removal.to(dtype)
            k = k.to(dtype) * (1 + self.replacement.to(dtype) * (a - 1))
            parts = (r.to(dtype), k, v.to(dtype), gate, a, removed)
            r, k, v, gate, a, removed = (part.unflatten(-1, (self.heads, -1)) for part in parts)
            kappa = unit(removed)
            # The rule reads the state after its decay, kappa the one before.
            read, state = delta_rule(r, k, v, kappa * torch.exp(-gate), -a * kappa, gate, layout.marks(), state)
            bonus = (r * self.bonus.to(dtype) * k).sum(-1, keepdim=True) * v
            y = (self.norm(read) + bonus.flatten(2)) * g.to(dtype)
        return y.to(x.dtype), Memory(recent, state) if keep else None
