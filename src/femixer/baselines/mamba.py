"""As published: Mamba, a selective state space between a short convolution and a gate, and Mamba2, one decay per head
between a short convolution and a gated norm (state space duality).
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
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.baselines.kernels.selective_scan import selective_scan
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout
from femixer.options import check


class Mamba(Baseline):
    """y_t = [(sum_n c_t[n] h_t[n] + D u_t) * silu(z_t)] W_o, per channel, with u = silu(conv(x W_u)), z = x W_z and

        h_t[n] = exp(delta_t A[n]) h_{t-1}[n] + delta_t b_t[n] u_t,   A < 0,   delta = softplus(u W_1 W_2 + bias)

    b and c are projections of u, of any sign, shared by all channels. C = expand * dim channels, state_size modes each,
    rank of the steps' map dim / 16. 6 dim² parameters at the published expansion of 2, and
    2 dim (7 + 2 rank + 3 state_size) more; no use of heads. Gu and Dao 2023, arXiv 2312.00752.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        state_size: int = 16,
        expand: float = 2.0,
        conv_width: int = 4,
        rank: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        rank = -(-dim // 16) if rank is None else rank
        check_sizes(state_size=state_size, conv_width=conv_width, rank=rank)
        check(round(expand * dim) >= 1, "expand", expand, "a positive factor of dim")
        self.inner, self.state_size, self.rank = round(expand * dim), state_size, rank
        self.in_proj = self.linear(dim, 2 * self.inner)
        self.convolution = ShortConvolution(self.inner, conv_width, bias=True, **self.factory_kwargs)
        self.select_proj = self.linear(self.inner, rank + 2 * state_size, bias=False)
        self.step_proj = self.linear(rank, self.inner, bias=True)
        self.log_rate = self.empty(state_size, self.inner)  # A = -exp(log_rate)
        self.skip = self.empty(self.inner)  # D
        self.out_proj = self.linear(self.inner, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.step_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        with torch.no_grad():
            random_steps_(self.step_proj.bias)
            modes = torch.arange(1, self.state_size + 1, dtype=torch.float64, device=self.log_rate.device)
            self.log_rate.copy_(modes.log()[:, None].expand_as(self.log_rate))
            self.skip.fill_(1)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        u, z = self.in_proj(x).chunk(2, -1)
        u, recent = self.convolution(u, layout, None if memory is None else memory.recent)
        u = F.silu(u)
        low, b, c = self.select_proj(u).split((self.rank, self.state_size, self.state_size), -1)
        dtype = torch.promote_types(u.dtype, torch.float32)
        step = F.softplus(self.step_proj(low).to(dtype))
        rate = -self.log_rate.to(dtype).exp()
        state = None if memory is None else memory.states
        y, modes = selective_scan(rate, step, b, c, u, layout.marks(), state)
        y = (y + self.skip.to(dtype) * u) * F.silu(z.to(dtype))
        return y.to(x.dtype), Memory(recent, modes) if keep else None


# As published: rates A start between these.
RATES = (1.0, 16.0)
STATE_SIZE = 128


class Mamba2(Baseline):
    """y_t = RMSNorm([S_tᵀ c_t + D u_t] * silu(z_t)) W_o, the norm over all heads, with

        S_t = exp(-A delta_t) S_{t-1} + delta_t b_t u_tᵀ,    delta_t = softplus(x_t W_delta + bias)

    A, delta and D are one number per head; [u, b, c] = silu(conv(x W)); b and c of width state_size = N are shared by
    all heads. state_size: by default dim / 4 up to the published 128. u has expand * dim channels. 6 dim² parameters at
    the published expansion of 2, and dim (2 N + heads) more: about 6.5 dim² by default.
    Dao and Gu 2024, arXiv 2405.21060.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        state_size: int | None = None,
        expand: float = 2.0,
        conv_width: int = 4,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        state_size = max(1, min(STATE_SIZE, dim // 4)) if state_size is None else state_size
        check_sizes(state_size=state_size, conv_width=conv_width)
        check(round(expand * dim / heads) >= 1, "expand", expand, "a positive factor of dim / heads channels")
        self.state_size, inner = state_size, heads * round(expand * dim / heads)
        self.widths = (inner, inner + 2 * state_size, heads)
        self.in_proj = self.linear(dim, sum(self.widths))
        self.convolution = ShortConvolution(self.widths[1], conv_width, bias=True, **self.factory_kwargs)
        self.step_bias = self.empty(heads)
        self.log_rate = self.empty(heads)  # A = exp(log_rate)
        self.skip = self.empty(heads)  # D
        self.norm = RMSNorm(inner, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(inner, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            random_steps_(self.step_bias)
            self.log_rate.copy_(torch.empty_like(self.log_rate).uniform_(*RATES).log())
            self.skip.fill_(1)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        z, u, logits = self.in_proj(x).split(self.widths, -1)
        recent, state = (None, None) if memory is None else memory
        u, recent = self.convolution(u, layout, recent)
        inner, size = self.widths[0], self.state_size
        dtype = torch.promote_types(u.dtype, torch.float32)
        with without_autocast(x.device):
            u, b, c = F.silu(u.to(dtype)).split((inner, size, size), -1)
            u = u.unflatten(-1, (self.heads, -1))
            step = F.softplus(logits.to(dtype) + self.step_bias.to(dtype))
            gate = -self.log_rate.to(dtype).exp() * step
            b, c, v = b[:, :, None], c[:, :, None], step[..., None] * u
            read, state = linear_attention(c, b, v, gate, layout.marks(), state, keep=keep)
            y = (read + self.skip.to(dtype)[:, None] * u).flatten(2)
            y = self.norm(y * F.silu(z.to(dtype)))
        return y.to(x.dtype), None if state is None else Memory(recent, state)
