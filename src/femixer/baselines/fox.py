"""Forgetting attention as published: softmax attention whose scores decay by gates of the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.attention import head_width
from femixer.baselines.base import Baseline, RMSNorm
from femixer.baselines.convolution import token_before
from femixer.layout import Layout
from femixer.options import check
from femixer.priors.base import Widths
from femixer.priors.fox import FoxPrior
from femixer.priors.softmax import Cache

VARIANTS = ("pro", "llama")


class Memory(NamedTuple):
    """The last projected key and value [B, 1, 2 H E], and the cache of attention."""

    recent: Tensor | None
    cache: Cache


class FoX(Baseline):
    """o_t = sum_i softmax_i(<q_t, k_i> / sqrt(E) + log f_{i+1} + ... + log f_t) v_i, with f = sigmoid(x w_f - b_f) per
    head; no other positions. E = expand dim / heads.

    variant="llama": y = o W_o, 4 dim² parameters. variant="pro": the publication's own block,

        y_t = [RMSNorm(o_t) * sigmoid(x_t W_g)] W_o,  q = RMSNorm(x W_q),  k = RMSNorm(shift(x W_k)),  v = shift(x W_v),
        shift(u)_t = a_t u_{t-1} + (1 - a_t) u_t with a = sigmoid(x w) per head,

    norms per head with weights of their own. Published with expand=1, 5 dim² parameters; the default has all widths at
    4/5 of that, so 4 dim². Both have dim heads more for each of the gates f and a; b_f starts at zero, as published.
    Lin et al. 2025, arXiv 2503.02130.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        variant: str = "pro",
        expand: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
        self.pro = variant == "pro"
        self.width = width = head_width(dim, heads, (0.8 if self.pro else 1.0) if expand is None else expand, 2)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.widths = (heads * width, 2 * heads * width, heads)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        if self.pro:
            self.shift_proj = nn.Linear(dim, 2 * heads, bias=False, **made)
            self.gate_proj = nn.Linear(dim, heads * width, bias=bias, **made)
            self.query_norm, self.key_norm, self.norm = (HeadsNorm(heads, width, **made) for _ in range(3))
        self.out_proj = nn.Linear(heads * width, dim, bias=bias, **made)
        self.prior = FoxPrior(heads, heads, Widths(width, width), causal=True, rope=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.prior.decay_bias)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        recent, cache = (None, None) if memory is None else memory
        q, kv, forget = self.in_proj(x).split(self.widths, -1)
        if self.pro:
            before, recent = token_before(kv, layout, recent)
            share = self.shift_proj(x).sigmoid().repeat_interleave(self.width, -1)
            kv = torch.lerp(kv, before, share)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).unbind(2)
        q = q.unflatten(-1, (self.heads, -1))
        if self.pro:
            q, k = self.query_norm(q), self.key_norm(k)
        inputs = {"q": q.flatten(2), "k": k.flatten(2), "decay": -forget}
        o, _, cache = self.prior.read(inputs, v, None, layout, cache, keep)
        if self.pro:
            o = self.norm(o) * self.gate_proj(x).to(o.dtype).sigmoid().unflatten(-1, (self.heads, -1))
        return self.out_proj(self.dropout(o.flatten(2).to(x.dtype))), Memory(recent, cache) if keep else None


class HeadsNorm(RMSNorm):
    """x / rms(x) * weight over the channels of each head, x [B, T, H, E]; every head has weights of its own."""

    def __init__(self, heads: int, width: int, **made: Any) -> None:
        super().__init__((width,), eps=1e-6, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(heads, width, **made))

    def reset_parameters(self) -> None:
        if hasattr(self, "scale"):
            nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        # torch.compile has wrong strides for the gradient of other layouts.
        return F.rms_norm(x.contiguous(), self.normalized_shape, eps=self.eps) * self.scale.to(x.dtype)
