"""HGRN, an elementwise recurrence whose forget gate has a lower bound, and HGRN2, with outer products as states."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, Common, HeadNorm, RMSNorm, made_with
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.marks import reversed_marks
from femixer.kernels.operator import without_autocast
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import Layout
from femixer.options import check


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
        bias, made = made_with(common)
        inner = self.parts * self.width
        self.in_proj = nn.Linear(dim, 2 * inner + self.width, bias=bias, **made)
        self.out_proj = nn.Linear(inner, dim, bias=bias, **made)
        # Over all channels at once, so as one head.
        self.norm = HeadNorm(1, inner, **made) if complex else RMSNorm(inner, eps=1e-5, **made)
        self.theta = nn.Parameter(torch.empty(self.width, **made)) if complex else None
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
        return self.out_proj(self.dropout(o.to(x.dtype))), last.clone() if keep else None

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
        bias, made = made_with(common)
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
