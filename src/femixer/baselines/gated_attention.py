"""Gated attention as published: a sigmoid of the token on what its heads read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from femixer.baselines.attention import Attention
from femixer.layout import Layout
from femixer.options import check

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
        causal: bool = True,
        kv_heads: int | None = None,
        rope: bool = True,
        rope_base: float = 10000.0,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        gate: str = "elementwise",
        expand: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check(gate in GATES, "gate", gate, f"one of {', '.join(GATES)}")
        if expand is None:
            expand = 0.8 if gate == "elementwise" else 1.0
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(dim, heads, causal, kv_heads, rope, rope_base, bias, dropout, expand=expand, **made)
        self.gate_proj = nn.Linear(dim, heads * (self.width if gate == "elementwise" else 1), bias=bias, **made)
        self.reset_parameters()

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        read, memory = self._read(x, layout, memory, keep)
        gate = self.gate_proj(x).sigmoid().unflatten(-1, (self.heads, -1))
        return self.out_proj(self.dropout((gate * read).flatten(2))), memory
