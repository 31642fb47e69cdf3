"""HGRN2: HGRN's gated recurrence with outer products as states."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.baselines.norm import RMSNorm
from femixer.kernels.marks import reversed_marks
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout
from femixer.options import check


class HGRN2(Baseline):
    """y_t = RMSNorm(S_tᵀ silu(x_t W_q) / sqrt(E)) W_o, the norm over all heads, with

        S_t = diag(f_t) S_{t-1} + (1 - f_t) (x_t W_i)ᵀ,    f_t = lower_bound + (1 - lower_bound) sigmoid(x_t W_f)

    per head of E = dim / heads channels: what a channel forgets is what it takes in. 4 dim² parameters. The publication
    learns lower bounds that grow with depth from 0 in the first layer; here the bound is an option of the layer. As an
    encoder it adds the same read in reversed time, as its public code does. Qin et al. 2024, arXiv 2404.07904.
    """

    encoder = True

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        lower_bound: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(0 <= lower_bound < 1, "lower_bound", lower_bound, "a number from 0 to below 1")
        self.lower_bound = lower_bound
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias, **made)
        self.norm = RMSNorm(dim, eps=1e-5, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, f, i = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        dtype = torch.promote_types(i.dtype, torch.float32)
        with without_autocast(x.device):
            q, f = F.silu(q.to(dtype)) * q.shape[-1] ** -0.5, f.to(dtype)
            k = (1 - self.lower_bound) * torch.sigmoid(-f)
            gate, marks = self._log_forget(f), layout.marks()
            read, state = linear_attention(q, k, i, gate, marks, memory, keep=keep)
            if not self.causal:
                q, k, i, gate = (part.flip(1) for part in (q, k, i, gate))
                read = read + linear_attention(q, k, i, gate, reversed_marks(marks), keep=False)[0].flip(1)
            y = self.norm(read.flatten(2))
        return self.out_proj(self.dropout(y.to(x.dtype))), state

    def _log_forget(self, logits: Tensor) -> Tensor:
        """log(lower_bound + (1 - lower_bound) sigmoid(logits)), also where the sigmoid is zero."""
        log = F.logsigmoid(logits)
        if self.lower_bound == 0:
            return log
        least = torch.full_like(log, math.log(self.lower_bound))
        return torch.logaddexp(least, log + math.log1p(-self.lower_bound))
