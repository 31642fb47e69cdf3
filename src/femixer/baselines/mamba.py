"""Mamba as published: a selective state space between a short convolution and a gate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.convolution import Memory, ShortConvolution
from femixer.baselines.kernels.selective_scan import selective_scan
from femixer.baselines.steps import random_steps_
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
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        state_size: int = 16,
        expand: float = 2.0,
        conv_width: int = 4,
        rank: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        rank = -(-dim // 16) if rank is None else rank
        for name, size in (("state_size", state_size), ("conv_width", conv_width), ("rank", rank)):
            check(isinstance(size, int) and size >= 1, name, size, "a positive integer")
        check(round(expand * dim) >= 1, "expand", expand, "a positive factor of dim")
        self.inner, self.state_size, self.rank = round(expand * dim), state_size, rank
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 2 * self.inner, bias=bias, **made)
        self.convolution = ShortConvolution(self.inner, conv_width, bias=True, **made)
        self.select_proj = nn.Linear(self.inner, rank + 2 * state_size, bias=False, **made)
        self.step_proj = nn.Linear(rank, self.inner, **made)
        self.log_rate = nn.Parameter(torch.empty(state_size, self.inner, **made))  # A = -exp(log_rate)
        self.skip = nn.Parameter(torch.empty(self.inner, **made))  # D
        self.out_proj = nn.Linear(self.inner, dim, bias=bias, **made)
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
        y = self.out_proj(self.dropout(y.to(x.dtype)))
        return y, Memory(recent, modes) if keep else None
