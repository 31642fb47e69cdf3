"""Linear attention as published: positive features of queries and keys in place of softmax; RetNet's retention, with a
fixed decay per head; gated linear attention, with decays per key channel, an output norm and a gate; gated slot
attention, which is softmax attention over a fixed number of slots, each a gated average of the past; the attention free
transformer, in which every channel averages the past with weights of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, HeadNorm, RMSNorm, check_sizes, made_with
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.channel_scan import channel_scan
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout
from femixer.options import check
from femixer.rotary import Rotation, check_base, rotated

FEATURE_MAPS = ("elu", "learned")
EPS = 1e-6


class LinearAttention(Baseline):
    """y_t = [S_tᵀ φ(q_t) / (<φ(q_t), z_t> + 1e-6)] W_o per head, with E = dim / heads and

        S_t = S_{t-1} + φ(k_t) v_tᵀ,    z_t = z_{t-1} + φ(k_t)

    feature_map="elu": φ(x) = elu(x) + 1. Katharopoulos et al. 2020, arXiv 2006.16236. 4 dim² parameters.
    feature_map="learned": φ(x) = [softmax(x W), softmax(-x W)], 2 E features, with matrices W per head for queries and
    for keys that start as identity (Hedgehog). Zhang et al. 2024, arXiv 2402.04347. 2 dim² / heads parameters more.
    """

    def __init__(self, dim: int, heads: int, *, feature_map: str = "elu", **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        check(feature_map in FEATURE_MAPS, "feature_map", feature_map, f"one of {', '.join(FEATURE_MAPS)}")
        self.width = width = dim // heads
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.feature_map: nn.Parameter | None = None  # of queries and of keys
        if feature_map == "learned":
            self.feature_map = nn.Parameter(torch.empty(2, heads, width, width, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.feature_map is not None:
            with torch.no_grad():
                self.feature_map.copy_(torch.eye(self.width).expand_as(self.feature_map))

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, self.width)).unbind(2)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            q, k, v = self._features(q.to(dtype), 0), self._features(k.to(dtype), 1), v.to(dtype)
            # A value of one sums the keys.
            sums, state = linear_attention(q, k, F.pad(v, (0, 1), value=1.0), None, layout.marks(), memory, keep=keep)
            y = sums[..., :-1] / (sums[..., -1:] + EPS)
        return self.out_proj(self.dropout(y.flatten(2).to(x.dtype))), state

    def _features(self, x: Tensor, of: int) -> Tensor:
        """[B, T, H, E] -> [B, T, H, E or 2 E], positive."""
        if self.feature_map is None:
            return F.elu(x) + 1
        logits = torch.einsum("bthe,hef->bthf", x, self.feature_map[of].to(x.dtype))
        return torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)


class RetNet(Baseline):
    """y_t = [GroupNorm(S_tᵀ R_t q_t / sqrt(E)) * silu(x_t W_g)] W_o per head h, with

        S_t = (1 - 2^(-5-h)) S_{t-1} + (R_t k_t) v_tᵀ,    R_t: rotation by the token's position

    Values have expand * dim channels in all, queries and keys half as many (rounded up to even heads), the published
    ratio. 4 expand dim² parameters: 4 dim² by default; published is expand=2, with a feed-forward layer half as wide.
    The publication's other normalizations of the scores cancel in the norm. Sun et al. 2023, arXiv 2307.08621.
    """

    def __init__(
        self, dim: int, heads: int, *, expand: float = 1.0, rope_base: float = 10000.0, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        check(round(expand * dim / heads) >= 1, "expand", expand, "a positive factor of dim / heads channels")
        check_base(rope_base)
        self.rope_base = rope_base
        value = heads * round(expand * dim / heads)
        self.width = 2 * -(-value // (4 * heads))
        self.widths = (heads * self.width, heads * self.width, value, value)
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.norm = HeadNorm(heads, value, eps=1e-5, **made)
        self.out_proj = nn.Linear(value, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v, g = self.in_proj(x).split(self.widths, -1)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            q, k = rotated(q, k, Rotation(layout.position, self.width, self.rope_base), dtype)
            head = torch.arange(self.heads, dtype=torch.float64, device=x.device)
            gate = torch.log1p(-(2.0 ** (-5 - head))).expand(1, x.shape[1], -1)
            v = v.unflatten(-1, (self.heads, -1))
            read, state = linear_attention(q * self.width**-0.5, k, v, gate, layout.marks(), memory, keep=keep)
            y = self.norm(read) * F.silu(g.to(dtype))
        return self.out_proj(self.dropout(y.to(x.dtype))), state


# Log decays are divided by this: a sigmoid of one half keeps 0.96 of a channel.
CALM = 16.0


class GLA(Baseline):
    """y_t = [RMSNorm(S_tᵀ q_t / sqrt(E)) * silu(x_t W_g)] W_o per head, with

        S_t = diag(a_t) S_{t-1} + k_t v_tᵀ,    a_t = sigmoid(x_t W_1 W_2 + b)^(1/16) per key channel

    Keys have E = dim / (2 heads) channels, values dim / heads, as published; rank: that of the decays' map.
    4 dim² parameters, and dim (3 rank / 2) for the decays. Yang et al. 2023, arXiv 2312.06635.
    """

    def __init__(self, dim: int, heads: int, *, rank: int = 16, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        check_sizes(rank=rank)
        self.width = -(-dim // (2 * heads))
        keys = heads * self.width
        self.widths = (keys, keys, dim, dim, rank)
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=bias, **made)
        self.decay_proj = nn.Linear(rank, keys, **made)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v, g, low = self.in_proj(x).split(self.widths, -1)
        logits = self.decay_proj(low)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            q, gate = q.to(dtype) * self.width**-0.5, F.logsigmoid(logits.to(dtype)) / CALM
            q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v, gate))
            read, state = linear_attention(q, k, v, gate, layout.marks(), memory, keep=keep)
            y = self.norm(read).flatten(2) * F.silu(g.to(dtype))
        return self.out_proj(self.dropout(y.to(x.dtype))), state


# Log decays are divided by this, as published.
CALM_SLOTS = 8.0


class Slots(NamedTuple):
    """Keys of the slots, transposed, [B, H, E, M] and their values [B, H, M, E]."""

    keys: Tensor
    values: Tensor


class GSA(Baseline):
    """y_t = RMSNorm(silu(V_tᵀ softmax(K_t q_t))) W_o, the norm over all heads, with M slots per head and

        K_t = diag(a_t) K_{t-1} + (1 - a_t) k_tᵀ,    V_t = diag(a_t) V_{t-1} + (1 - a_t) v_tᵀ,
        a_t = sigmoid(x_t W_a)^(1/8) per slot,       q, k, v = silu(x W)

    Both are linear attention: reading K has its decays on what is read, reading V on the softmax. slots: M, by default
    dim / heads, which gives 5 dim² parameters (4 dim² and dim heads M). Zhang et al. 2024, arXiv 2409.07146.
    """

    def __init__(self, dim: int, heads: int, *, slots: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        slots = dim // heads if slots is None else slots
        check_sizes(slots=slots)
        self.slots = slots
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, 3 * dim + heads * slots, bias=bias, **made)
        self.norm = RMSNorm(dim, eps=1e-5, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        projected = self.in_proj(x)
        dtype = torch.promote_types(projected.dtype, torch.float32)
        keys, values = (None, None) if memory is None else memory
        with without_autocast(x.device):
            content, logits = projected.to(dtype).split((3 * self.dim, self.heads * self.slots), -1)
            q, k, v = F.silu(content).unflatten(-1, (3, self.heads, -1)).unbind(2)
            gate = F.logsigmoid(logits).unflatten(-1, (self.heads, self.slots)) / CALM_SLOTS
            fresh = -torch.expm1(gate)
            scores, keys = linear_attention(q, k, fresh, gate, layout.marks(), keys, of_values=True, keep=keep)
            read, values = linear_attention(scores.softmax(-1), fresh, v, gate, layout.marks(), values, keep=keep)
            y = self.norm(F.silu(read.flatten(2)))
        memory = None if keys is None or values is None else Slots(keys, values)
        return self.out_proj(self.dropout(y.to(x.dtype))), memory


class AFT(Baseline):
    """y_t = [sigmoid(q_t) * sum_{i<=t} exp(k_i) v_i / sum_{i<=t} exp(k_i)] W_o, per channel: AFT-simple.

    The form without position biases, as in the paper's comparison (its prior "LRNN-softmax"); AFT-full and AFT-local
    add learned biases of a fixed length. Exact for keys of any size. 4 dim² parameters, no use of heads.
    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, dim: int, heads: int, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        bias, made = made_with(common)
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v = self.in_proj(x).chunk(3, -1)
        dtype = torch.promote_types(v.dtype, torch.float32)
        # The scan has its three rows first; a state has the batch first.
        state = None if memory is None else memory.transpose(0, 1)
        read = channel_scan(k.to(dtype), None, v.to(dtype), None, layout.marks(), state)
        y = self.out_proj(self.dropout((q.sigmoid() * read.mean).to(x.dtype)))
        return y, read.state.transpose(0, 1) if keep else None
