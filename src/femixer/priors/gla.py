"""Gated linear attention as prior: p_t(i) proportional to <q_t, k_i> decayed by input-dependent gates after i."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import spread_decay_
from femixer.kernels.softplus import softplus
from femixer.layout import Layout
from femixer.priors.base import Widths
from femixer.priors.linear import LinearPrior
from femixer.projection import Columns

DECAYS = ("scalar", "head", "channel")


class GLAPrior(LinearPrior):
    """decay="scalar": one gate for all heads. decay="head": one per key/value head. decay="channel": one per key
    channel, through a map of low rank.

    g = -softplus(logits + b), with b spread over memory spans of 2 to 1000 tokens; one gate alone starts at 45.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        rope: bool = True,
        rope_base: float = 10000.0,
        decay: str = "head",
        **made: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, rope=rope, rope_base=rope_base, **made)
        if decay not in DECAYS:
            raise ValueError(f"decay={decay!r} is unknown; choose one of {', '.join(DECAYS)}")
        self.decay, self.reads_on = decay, decay == "channel"
        self.gates = widths.key if decay == "channel" else 1
        self.shared_columns = () if decay == "head" else ("decay",)
        gated_heads = 1 if decay == "scalar" else kv_heads
        self.rank = min(16, max(1, kv_heads * widths.key // 32)) if decay == "channel" else gated_heads
        self.decay_bias = nn.Parameter(torch.empty(gated_heads, self.gates, **made))
        self.shared_parameters = ("decay_bias",) if decay == "scalar" else ()
        self.decay_map: nn.Parameter | None = None
        if decay == "channel":
            self.decay_map = nn.Parameter(torch.empty(kv_heads * self.gates, self.rank, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for bias in self.decay_bias if self.decay == "channel" else [self.decay_bias]:
            spread_decay_(bias)
        if self.decay_map is not None:
            nn.init.normal_(self.decay_map, std=self.rank**-0.5)

    def columns(self) -> dict[str, Columns]:
        return {**super().columns(), "decay": Columns(self.rank, additive=True)}

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        logits = inputs["decay"].to(dtype)
        if self.decay_map is not None:
            logits = F.linear(logits, self.decay_map.to(dtype))
        gate = softplus(logits.unflatten(-1, self.decay_bias.shape), self.decay_bias, scale=-1.0)
        return {**super().tracks(inputs, layout, dtype), "gate": gate.expand(-1, -1, self.kv_heads, -1)}
