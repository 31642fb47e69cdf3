"""Softmax attention as published whose positions the tokens make: forgetting attention, by gates between them, and
PaTH, by a product of Householder-like maps.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.attention import head_width
from femixer.baselines.base import Baseline, Common, RMSNorm, ShortConvolution, check_sizes, made_with, token_before
from femixer.baselines.kernels.chunks import unit
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout, segments_together
from femixer.options import check
from femixer.priors.base import Widths
from femixer.priors.fox import FoxPrior
from femixer.priors.softmax import Cache

VARIANTS = ("pro", "llama")


class FoXMemory(NamedTuple):
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
        self, dim: int, heads: int, *, variant: str = "pro", expand: float | None = None, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        check(variant in VARIANTS, "variant", variant, f"one of {', '.join(VARIANTS)}")
        self.pro = variant == "pro"
        self.width = width = head_width(dim, heads, (0.8 if self.pro else 1.0) if expand is None else expand, 2)
        bias, made = made_with(common)
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
        return self.out_proj(self.dropout(o.flatten(2).to(x.dtype))), FoXMemory(recent, cache) if keep else None


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


# Tokens whose maps are multiplied at once.
CHUNK = 64
# As published: the largest rank of the map to w.
RANK = 32


class PaTHMemory(NamedTuple):
    """Keys of the tokens seen as the last of them sees them, and their values, [B, H, S, E] each; their segments [B, S]
    where there was padding or a segment; the last inputs of the convolution [B, n, dim]."""

    keys: Tensor
    values: Tensor
    segment: Tensor | None
    recent: Tensor


class PaTH(Baseline):
    """y_t = sum_i softmax_i(<q_t, H_t H_{t-1} ... H_{i+1} k_i> / sqrt(E)) v_i W_o per head, with E = dim / heads,

        H_t = 1 - beta_t w_t w_tᵀ,    beta_t = 2 sigmoid(x_t W_beta + b),    w = unit(silu(conv(x W_1 W_2)))

    No other positions. W_1 W_2 has rank 32, here at most dim / 16, and the convolution width 3. 4 dim² parameters, and
    dim (2 rank + heads + conv_width) more. A stream turns all its keys by every H_t, so a token costs what reading them
    costs. Yang et al. 2025, arXiv 2505.16381.
    """

    def __init__(
        self, dim: int, heads: int, *, rank: int | None = None, conv_width: int = 3, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        rank = max(1, min(RANK, dim // 16)) if rank is None else rank
        check_sizes(rank=rank, conv_width=conv_width)
        self.widths = (3 * dim, rank)
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.map_proj = nn.Linear(rank, dim, bias=False, **made)
        self.beta_proj = nn.Linear(dim, heads, **made)
        self.convolution = ShortConvolution(dim, conv_width, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        qkv, low = self.in_proj(x).split(self.widths, -1)
        w, recent = self.convolution(self.map_proj(low), layout, None if memory is None else memory.recent)
        logits, segment = self.beta_proj(x), layout.segment
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        with without_autocast(x.device):
            q, k, v = qkv.to(dtype).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            w = unit(F.silu(w.to(dtype)).unflatten(-1, (self.heads, -1))).transpose(1, 2)
            beta = 2 * torch.sigmoid(logits.to(dtype))
            if layout.padding is not None:
                beta = beta.masked_fill(layout.padding[..., None], 0)
            keys = values = q[:, :, :0]
            if memory is not None:
                keys, values = memory.keys, memory.values
                segment = segments_together(memory.segment, keys.shape[2], segment, x)
            read, keys, values = path_attention(q, k, v, w, beta.transpose(1, 2), keys, values, segment)
        y = self.out_proj(self.dropout(read.transpose(1, 2).flatten(2).to(x.dtype)))
        return y, PaTHMemory(keys, values, segment, recent) if keep else None


def path_attention(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, segment: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(what queries read [B, H, T, E], keys and values [B, H, S + T, E] after the last token).

    q, k, v, w [B, H, T, E]; beta [B, H, T]; keys and values of S tokens before, [B, H, S, E], the keys as the last of
    those tokens sees them; segment [B, S + T]. A chunk at a time: with u_s = w_sᵀ x before H_s is applied to x,

        (1 + A) U = W X,    A_ts = w_tᵀ w_s beta_s for s < t,    H_t ... H_1 x = x - sum_{s<=t} beta_s u_s w_s
    """
    reads, values = [], torch.cat([values, v], 2)
    for q, k, w, beta in zip(*(x.split(CHUNK, 2) for x in (q, k, w, beta)), strict=True):  # noqa: B020
        (length, width), before = q.shape[2:], keys.shape[2]
        weighted = beta[..., None] * w
        known = torch.cat([w, (w @ k.mT).tril(-1)], -1)
        solved = torch.linalg.solve_triangular((w @ weighted.mT).tril(-1), known, upper=False, unitriangular=True)
        of_past, of_own = solved.split((width, length), -1)
        reach = (q @ weighted.mT).tril()
        scores = torch.cat([(q - reach @ of_past) @ keys.mT, q @ k.mT - reach @ of_own], -1) * width**-0.5
        scores = scores.masked_fill(_hidden(length, before, segment, q.device), -torch.inf)
        reads.append(scores.softmax(-1) @ values[:, :, : before + length])
        keys = torch.cat([keys - keys @ of_past.mT @ weighted, k - of_own.mT @ weighted], 2)
    return torch.cat(reads, 2), keys, values


def _hidden(length: int, before: int, segment: Tensor | None, device: torch.device) -> Tensor:
    """bool [length, before + length] or [B, 1, ...]: which keys up to the last of these tokens they do not see."""
    hidden = torch.ones(length, before + length, dtype=torch.bool, device=device).triu(before + 1)
    if segment is None:
        return hidden
    keys = segment[:, None, None, : before + length]
    return hidden | (keys[..., before:].mT != keys)
