"""Linear attention as published: positive features of queries and keys in place of softmax; RetNet's retention, with a
fixed decay per head; gated linear attention, with decays per key channel, an output norm and a gate; gated slot
attention, which is softmax attention over a fixed number of slots, each a gated average of the past; the attention free
transformer, in which every channel averages the past with weights of its own; HGRN, an elementwise recurrence whose
forget gate has a lower bound, and HGRN2, with outer products as states.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, HeadNorm, RMSNorm, check_sizes
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.channel_scan import channel_scan
from femixer.kernels.marks import reversed_marks
from femixer.kernels.operator import without_autocast
from femixer.kernels.recurrence import linear_recurrence
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
        self.in_proj = self.linear(dim, 3 * dim)
        self.out_proj = self.linear(dim, dim)
        self.feature_map: nn.Parameter | None = None  # of queries and of keys
        if feature_map == "learned":
            self.feature_map = self.empty(2, heads, width, width)
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
        return y.flatten(2).to(x.dtype), state

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
        self.in_proj = self.linear(dim, sum(self.widths))
        self.norm = HeadNorm(heads, value, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(value, dim)
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
        return y.to(x.dtype), state


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
        self.in_proj = self.linear(dim, sum(self.widths))
        self.decay_proj = self.linear(rank, keys, bias=True)
        self.norm = RMSNorm(dim // heads, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
        return y.to(x.dtype), state


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
        self.in_proj = self.linear(dim, 3 * dim + heads * slots)
        self.norm = RMSNorm(dim, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
        return y.to(x.dtype), memory


class AFT(Baseline):
    """y_t = [sigmoid(q_t) * sum_{i<=t} exp(k_i) v_i / sum_{i<=t} exp(k_i)] W_o, per channel: AFT-simple.

    The form without position biases, as in the paper's comparison (its prior "LRNN-softmax"); AFT-full and AFT-local
    add learned biases of a fixed length. Exact for keys of any size. 4 dim² parameters, no use of heads.
    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, dim: int, heads: int, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        self.in_proj = self.linear(dim, 3 * dim)
        self.out_proj = self.linear(dim, dim)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v = self.in_proj(x).chunk(3, -1)
        dtype = torch.promote_types(v.dtype, torch.float32)
        # The scan has its three rows first; a state has the batch first.
        state = None if memory is None else memory.transpose(0, 1)
        read = channel_scan(k.to(dtype), None, v.to(dtype), None, layout.marks(), state)
        return (q.sigmoid() * read.mean).to(x.dtype), read.state.transpose(0, 1) if keep else None


class HGRN(Baseline):
    """y_t = [norm(h_t) * silu(x_t W_g)] W_o, with

        h_t = f_t * exp(i theta) * h_{t-1} + (1 - f_t) * silu(x_t W_c),
        f_t = lower_bound + (1 - lower_bound) sigmoid(x_t W_f)

    complex=False: theta = 0, real states of width dim and an RMS norm, the form that is in use today. complex=True: the
    published one: W_c gives real and imaginary part, each of width 4 dim / 7, theta is learned, the norm a LayerNorm.
    4 dim² parameters. The publication learns lower bounds that grow with depth from 0 in the first layer, starting at
    (layer - 1) / layers; here the bound is an option of the layer. As an encoder it adds to h the same recurrence in
    reversed time, as its public code does (which gives that angles of its own). Qin et al. 2023, arXiv 2311.04823.
    """

    encoder = True

    def __init__(
        self, dim: int, heads: int, *, lower_bound: float = 0.0, complex: bool = False, **common: Unpack[Common]
    ) -> None:
        super().__init__(dim, heads, **common)
        check(0 <= lower_bound < 1, "lower_bound", lower_bound, "a number from 0 to below 1")
        self.lower_bound, self.complex = lower_bound, complex
        self.parts = 2 if complex else 1
        self.width = max(1, round(4 * dim / 7)) if complex else dim
        inner = self.parts * self.width
        self.in_proj = self.linear(dim, 2 * inner + self.width)
        self.out_proj = self.linear(inner, dim)
        # Over all channels at once, so as one head.
        self.norm = (
            HeadNorm(1, inner, **self.factory_kwargs) if complex else RMSNorm(inner, eps=1e-5, **self.factory_kwargs)
        )
        self.theta = self.empty(self.width) if complex else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.theta is not None:
            with torch.no_grad():
                index = torch.arange(self.width, dtype=torch.float64, device=self.theta.device)
                self.theta.copy_(10000.0 ** (-2 * index / self.width))

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        inner = self.parts * self.width
        c, f, g = self.in_proj(x).split((inner, self.width, inner), -1)
        dtype = torch.promote_types(c.dtype, torch.float32)
        with without_autocast(x.device):
            fresh = (1 - self.lower_bound) * torch.sigmoid(-f.to(dtype))
            decay = 1 - fresh
            inputs = fresh[:, :, None] * F.silu(c.to(dtype)).unflatten(-1, (self.parts, self.width))
            if layout.padding is not None:
                padding = layout.padding[..., None]
                decay, inputs = decay.masked_fill(padding, 1), inputs.masked_fill(padding[..., None], 0)
            h, last = self._scanned(decay, inputs, layout, memory, False)
            if not self.causal:
                h = h + self._scanned(decay, inputs, layout, None, True)[0]
            o = self.norm(h[:, :, None]).flatten(2) * F.silu(g.to(dtype))
        return o.to(x.dtype), last.clone() if keep else None

    def _scanned(
        self, decay: Tensor, inputs: Tensor, layout: Layout, initial: Tensor | None, backwards: bool
    ) -> tuple[Tensor, Tensor]:
        """h [B, T, parts C] from decays [B, T, C] and inputs [B, T, parts, C], and the state after the last token."""
        resets = layout.ends if backwards else layout.starts
        decay = decay if resets is None else decay.masked_fill(resets[..., None], 0)
        # With exp(i theta) taken out of the state by the token's position, the recurrence is real.
        inputs = self._turned(inputs, layout.position, 1 if backwards else -1)
        decay, inputs = decay.repeat(1, 1, self.parts), inputs.flatten(2)
        if backwards:
            decay, inputs = decay.flip(1), inputs.flip(1)
        h = linear_recurrence(decay, inputs, torch.zeros_like(inputs[:, 0]) if initial is None else initial)
        last = h[:, -1]
        h = (h.flip(1) if backwards else h).unflatten(-1, (self.parts, self.width))
        return self._turned(h, layout.position, -1 if backwards else 1).flatten(2), last

    def _turned(self, h: Tensor, position: Tensor, direction: int) -> Tensor:
        """h * exp(direction i theta position), h [B, T, 2, C] with real and imaginary part."""
        if self.theta is None:
            return h
        angle = position[..., None] * self.theta.double()
        cos, sin = angle.cos().to(h.dtype), (direction * angle.sin()).to(h.dtype)
        real, imaginary = h.unbind(2)
        return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], 2)


class HGRN2(Baseline):
    """y_t = RMSNorm(S_tᵀ silu(x_t W_q) / sqrt(E)) W_o, the norm over all heads, with

        S_t = diag(f_t) S_{t-1} + (1 - f_t) (x_t W_i)ᵀ,    f_t = lower_bound + (1 - lower_bound) sigmoid(x_t W_f)

    per head of E = dim / heads channels: what a channel forgets is what it takes in. 4 dim² parameters. The publication
    learns lower bounds that grow with depth from 0 in the first layer; here the bound is an option of the layer. As an
    encoder it adds the same read in reversed time, as its public code does. Qin et al. 2024, arXiv 2404.07904.
    """

    encoder = True

    def __init__(self, dim: int, heads: int, *, lower_bound: float = 0.0, **common: Unpack[Common]) -> None:
        super().__init__(dim, heads, **common)
        check(0 <= lower_bound < 1, "lower_bound", lower_bound, "a number from 0 to below 1")
        self.lower_bound = lower_bound
        self.in_proj = self.linear(dim, 3 * dim)
        self.norm = RMSNorm(dim, eps=1e-5, **self.factory_kwargs)
        self.out_proj = self.linear(dim, dim)
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
        return y.to(x.dtype), state

    def _log_forget(self, logits: Tensor) -> Tensor:
        """log(lower_bound + (1 - lower_bound) sigmoid(logits)), also where the sigmoid is zero."""
        log = F.logsigmoid(logits)
        if self.lower_bound == 0:
            return log
        least = torch.full_like(log, math.log(self.lower_bound))
        return torch.logaddexp(least, log + math.log1p(-self.lower_bound))
