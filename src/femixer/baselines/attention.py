"""Softmax attention as everyone runs it (projections, rotary positions, torch's fused attention); gated attention, with
a sigmoid of the token on what its heads read; LASER, attention over exponentiated values; differential
attention, the difference of two softmax maps; and two whose positions the tokens make: forgetting attention, by gates
between them, and PaTH, by a product of Householder-like maps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, RMSNorm, ShortConvolution, check_sizes, token_before
from femixer.baselines.kernels.chunks import unit
from femixer.kernels.operator import without_autocast
from femixer.kernels.softmax import reading_dtype
from femixer.layout import Layout, segments_together
from femixer.options import check
from femixer.priors.base import Widths
from femixer.priors.fox import FoxPrior
from femixer.priors.softmax import Cache as PriorCache
from femixer.priors.softmax import SoftmaxPrior
from femixer.rotary import Rotation, check_base, rotated
from femixer.state import Growing


class Cache(NamedTuple):
    """Rotated keys and values of the tokens seen, [B, G, S, E] each: the layout that one query reads fastest; their
    segments [B, S] where there was padding or a segment."""

    keys: Growing
    values: Growing
    segment: Tensor | None


def head_width(dim: int, heads: int, expand: float, multiple: int = 1) -> int:
    """Channels of a head: about expand dim / heads, in multiples."""
    check(expand > 0, "expand", expand, "a positive factor of dim / heads channels")
    return max(multiple, multiple * round(expand * dim / heads / multiple))


class Attention(Baseline):
    """y_t = sum_i softmax_i(<q_t, k_i> / sqrt(E)) v_i W_o, [B, T, dim] -> [B, T, dim], with E = expand dim / heads.

    The rival that the benchmarks measure against, so nothing here may cost more than it must: 4 dim² parameters
    (2 (1 + G/H) dim² with G key/value heads), and FreeEnergyMixer(parts="") computes the same function.
    """

    encoder = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        rope: bool = True,
        rope_base: float = 10000.0,
        expand: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        own: Common = {"bias": True, **common}
        super().__init__(dim, heads, **own)
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1:
            raise ValueError(f"kv_heads={kv_heads!r} must be a positive integer")
        if heads % kv_heads:
            raise ValueError(f"heads={heads} is not divisible by kv_heads={kv_heads}")
        if rope and expand == 1 and dim // heads % 2:
            raise ValueError(
                f"dim={dim} with heads={heads} gives heads of {dim // heads} channels; rope needs an even number"
            )
        check_base(rope_base)
        self.kv_heads, self.rope, self.rope_base = kv_heads, rope, rope_base
        self.width = head_width(dim, heads, expand, 2 if rope else 1)
        # Two products are as fast as one, and what is rotated need not stay in memory with the values.
        self.query_key_proj = self.linear(dim, (heads + kv_heads) * self.width)
        self.value_proj = self.linear(dim, kv_heads * self.width)
        self.out_proj = self.linear(heads * self.width, dim)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        read, memory = self._read(x, layout, memory, keep)
        return read.flatten(2), memory

    def _read(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        """What the heads read, [B, T, H, E], and what to remember."""
        q, k, v = self._heads(x, layout.position)
        segment = layout.segment
        if memory is not None:
            segment = segments_together(memory.segment, memory.keys.length, segment, x)
            memory = Cache(memory.keys.append(k), memory.values.append(v), segment)
            k, v = memory.keys.tensor, memory.values.tensor
        elif keep:
            memory = Cache(Growing.of(k.contiguous()), Growing.of(v.contiguous()), segment)
        return self._attend(q, k, v, segment).transpose(1, 2), memory

    def _heads(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, E], keys and values [B, G, T, E] of tokens at their positions [B or 1, T]."""
        widths = (self.heads * self.width, self.kv_heads * self.width)
        q, k = self.query_key_proj(x).split(widths, -1)
        v = self.value_proj(x).unflatten(-1, (-1, self.width))
        if self.rope:
            q, k = rotated(q, k, Rotation(position, self.width, self.rope_base), q.dtype)
        else:
            q, k = (part.unflatten(-1, (-1, self.width)) for part in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segment: Tensor | None) -> Tensor:
        """[B, H, T, E]; causal queries are the last T of the S keys. segment [B, S]: see Layout."""
        (batch, heads, length, width), seen = q.shape, k.shape[2]
        if length == 1 and segment is None:
            # The queries that share a key become rows of one product, so grouped keys are read once.
            grouped = q.reshape(batch, self.kv_heads, -1, width)
            return F.scaled_dot_product_attention(grouped, k, v).view(q.shape)
        mask = None
        if self.causal and (length != seen or segment is not None):
            mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
        if segment is not None:
            together = segment[:, None, -length:, None] == segment[:, None, None]
            mask = together if mask is None else mask & together
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal and mask is None, enable_gqa=heads != self.kv_heads
        )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, rope={self.rope}"


GATES = ("elementwise", "headwise")


class GatedAttention(Attention):
    """y_t = [sigmoid(x_t W_g) * sum_i softmax_i(<q_t, k_i> / sqrt(E)) v_i] W_o, with E = expand dim / heads.

    The gate of the publication's best variant (G1): behind attention, of every head its own, from the layer's input.
    gate="elementwise" has one per channel, "headwise" one per head. Published is expand=1 with a narrower feed-forward
    layer, 5 dim² parameters for the elementwise gate; the default has all widths at 4/5 of that, so 4 dim² (headwise:
    4 dim² and dim heads at expand=1). Qiu et al. 2025, arXiv 2505.06708.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        rope: bool = True,
        rope_base: float = 10000.0,
        gate: str = "elementwise",
        expand: float | None = None,
        **common: Unpack[Common],
    ) -> None:
        check(gate in GATES, "gate", gate, f"one of {', '.join(GATES)}")
        if expand is None:
            expand = 0.8 if gate == "elementwise" else 1.0
        own: Common = {"bias": False, **common}
        super().__init__(dim, heads, kv_heads=kv_heads, rope=rope, rope_base=rope_base, expand=expand, **own)
        self.gate_proj = self.linear(dim, heads * (self.width if gate == "elementwise" else 1))
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        read, memory = self._read(x, layout, memory, keep)
        gate = self.gate_proj(x).sigmoid().unflatten(-1, (self.heads, -1))
        return (gate * read).flatten(2), memory


class Laser(Baseline):
    """y_t = log(sum_i softmax_i(<q_t, k_i> / sqrt(E)) exp(v_i)) W_o, with E = dim / heads.

    The free energy of softmax attention at the fixed temperature beta = 1, computed exactly at any range of values (the
    publication subtracts the largest value of the sequence, which is the same function where nothing underflows).
    4 dim² parameters. Duvvuri and Dhillon 2024, arXiv 2411.03493.
    """

    def __init__(
        self, dim: int, heads: int, *, rope: bool = True, rope_base: float = 10000.0, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        self.width = width = dim // heads
        if rope:
            check(width % 2 == 0, "heads", heads, f"so that rope has heads of an even width (dim={dim})")
        self.query_key_proj = self.linear(dim, 2 * dim)
        self.value_proj = self.linear(dim, dim)
        self.out_proj = self.linear(dim, dim)
        self.prior = SoftmaxPrior(heads, heads, Widths(width, width), causal=True, rope=rope, rope_base=rope_base)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k = self.query_key_proj(x).chunk(2, -1)
        v = self.value_proj(x).unflatten(-1, (-1, self.width))
        _, free, memory = self.prior.read({"q": q, "k": k}, v, torch.ones_like(v[0, 0]), layout, memory, keep)
        assert free is not None
        return free.flatten(2).to(x.dtype), memory


class DiffTransformer(Baseline):
    """o_t = (1 - lambda_init) RMSNorm(sum_i (p1_t(i) - lam p2_t(i)) v_i),   p_t(i) = softmax_i(<q_t, k_i> / sqrt(E))

        lam = exp(<lq1, lk1>) - exp(<lq2, lk2>) + lambda_init,   lambda_init = 0.8 - 0.6 exp(-0.3 (depth - 1))

    per head; y_t = o_t W_o. `heads` counts the softmax maps, as attention does: there are heads / 2 differential heads,
    each with two maps of width E = dim / heads and values of width 2 E. depth: the layer's place in the model, from 1.
    4 dim² parameters. Ye et al. 2024, arXiv 2410.05258.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        depth: int = 1,
        rope: bool = True,
        rope_base: float = 10000.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(dim, heads, **common)
        check(heads % 2 == 0, "heads", heads, "an even number: a differential head has two maps")
        check(isinstance(depth, int) and depth >= 1, "depth", depth, "the number of the layer, from 1")
        self.width = width = dim // heads
        if rope:
            check(width % 2 == 0, "heads", heads, f"so that rope has heads of an even width (dim={dim})")
        check_base(rope_base)
        self.rope, self.rope_base = rope, rope_base
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
        self.query_key_proj = self.linear(dim, 2 * dim)
        self.value_proj = self.linear(dim, dim)
        self.out_proj = self.linear(dim, dim)
        # The two maps of a head are two queries that read one key [k1, k2], each with zeros for the other's half.
        self.prior = SoftmaxPrior(heads, heads // 2, Widths(2 * width, 2 * width), causal=True, rope=False)
        self.lam = self.empty(4, width)  # lq1, lk1, lq2, lk2
        self.norm = RMSNorm(2 * width, eps=1e-5, **self.factory_kwargs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.lam, std=0.1)

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        v = self.value_proj(x).unflatten(-1, (-1, 2 * self.width))
        q, k = self._heads(x, layout, reading_dtype(v, None))
        # sqrt(2): the prior divides by the root of the widened key's width.
        first, second = (math.sqrt(2) * q.unflatten(2, (-1, 2))).unbind(3)
        widened = torch.stack([F.pad(first, (0, self.width)), F.pad(second, (self.width, 0))], 3)
        inputs = {"q": widened.flatten(2), "k": k.flatten(2)}
        read, _, memory = self.prior.read(inputs, v, None, layout, memory, keep)
        first, second = read.unflatten(2, (-1, 2)).unbind(3)
        q1, k1, q2, k2 = self.lam.to(read.dtype)
        lam = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init
        o = (1 - self.lambda_init) * self.norm(first - lam * second).flatten(2)
        return o.to(x.dtype), memory

    def _heads(self, x: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, H, E]; maps 2 j and 2 j + 1 are those of differential head j."""
        q, k = self.query_key_proj(x).chunk(2, -1)
        if self.rope:
            return rotated(q, k, Rotation(layout.position, self.width, self.rope_base), dtype)
        return q.unflatten(-1, (-1, self.width)).to(dtype), k.unflatten(-1, (-1, self.width)).to(dtype)


VARIANTS = ("pro", "llama")


class FoXMemory(NamedTuple):
    """The last projected key and value [B, 1, 2 H E], and the cache of attention."""

    recent: Tensor | None
    cache: PriorCache


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
        self.widths = (heads * width, 2 * heads * width, heads)
        self.in_proj = self.linear(dim, sum(self.widths))
        if self.pro:
            self.shift_proj = self.linear(dim, 2 * heads, bias=False)
            self.gate_proj = self.linear(dim, heads * width)
            self.query_norm, self.key_norm, self.norm = (
                HeadsNorm(heads, width, **self.factory_kwargs) for _ in range(3)
            )
        self.out_proj = self.linear(heads * width, dim)
        self.prior = FoxPrior(heads, heads, Widths(width, width), causal=True, rope=False, **self.factory_kwargs)
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
        return o.flatten(2).to(x.dtype), FoXMemory(recent, cache) if keep else None


class HeadsNorm(RMSNorm):
    """x / rms(x) * weight over the channels of each head, x [B, T, H, E]; every head has weights of its own."""

    def __init__(self, heads: int, width: int, **factory_kwargs: Any) -> None:
        super().__init__((width,), eps=1e-6, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(heads, width, **factory_kwargs))

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
        self.in_proj = self.linear(dim, sum(self.widths))
        self.map_proj = self.linear(rank, dim, bias=False)
        self.beta_proj = self.linear(dim, heads, bias=True)
        self.convolution = ShortConvolution(dim, conv_width, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
        return read.transpose(1, 2).flatten(2).to(x.dtype), PaTHMemory(keys, values, segment, recent) if keep else None


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
