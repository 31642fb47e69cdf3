"""The differential transformer's attention: the difference of two softmax maps."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, RMSNorm
from femixer.kernels.softmax import reading_dtype
from femixer.layout import Layout
from femixer.options import check
from femixer.priors.base import Widths
from femixer.priors.softmax import SoftmaxPrior
from femixer.rotary import Rotation, check_base, rotated


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
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        depth: int = 1,
        rope: bool = True,
        rope_base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(heads % 2 == 0, "heads", heads, "an even number: a differential head has two maps")
        check(isinstance(depth, int) and depth >= 1, "depth", depth, "the number of the layer, from 1")
        self.width = width = dim // heads
        if rope:
            check(width % 2 == 0, "heads", heads, f"so that rope has heads of an even width (dim={dim})")
        check_base(rope_base)
        self.rope, self.rope_base = rope, rope_base
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query_key_proj = nn.Linear(dim, 2 * dim, bias=bias, **made)
        self.value_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        # The two maps of a head are two queries that read one key [k1, k2], each with zeros for the other's half.
        self.prior = SoftmaxPrior(heads, heads // 2, Widths(2 * width, 2 * width), causal=True, rope=False)
        self.lam = nn.Parameter(torch.empty(4, width, **made))  # lq1, lk1, lq2, lk2
        self.norm = RMSNorm(2 * width, eps=1e-5, **made)
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
        return self.out_proj(self.dropout(o.to(x.dtype))), memory

    def _heads(self, x: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, H, E]; maps 2 j and 2 j + 1 are those of differential head j."""
        q, k = self.query_key_proj(x).chunk(2, -1)
        if self.rope:
            return rotated(q, k, Rotation(layout.position, self.width, self.rope_base), dtype)
        return q.unflatten(-1, (-1, self.width)).to(dtype), k.unflatten(-1, (-1, self.width)).to(dtype)
