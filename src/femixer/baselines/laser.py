"""LASER: attention over exponentiated values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.layout import Layout
from femixer.options import check
from femixer.priors.base import Widths
from femixer.priors.softmax import SoftmaxPrior


class Laser(Baseline):
    """y_t = log(sum_i softmax_i(<q_t, k_i> / sqrt(E)) exp(v_i)) W_o, with E = dim / heads.

    The free energy of softmax attention at the fixed temperature beta = 1, computed exactly at any range of values (the
    publication subtracts the largest value of the sequence, which is the same function where nothing underflows).
    4 dim² parameters. Duvvuri and Dhillon 2024, arXiv 2411.03493.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        rope: bool = True,
        rope_base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        self.width = width = dim // heads
        if rope:
            check(width % 2 == 0, "heads", heads, f"so that rope has heads of an even width (dim={dim})")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query_key_proj = nn.Linear(dim, 2 * dim, bias=bias, **made)
        self.value_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.prior = SoftmaxPrior(heads, heads, Widths(width, width), causal=True, rope=rope, rope_base=rope_base)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k = self.query_key_proj(x).chunk(2, -1)
        v = self.value_proj(x).unflatten(-1, (-1, self.width))
        _, free, memory = self.prior.read({"q": q, "k": k}, v, torch.ones_like(v[0, 0]), layout, memory, keep)
        assert free is not None
        return self.out_proj(self.dropout(free.flatten(2).to(x.dtype))), memory
