"""A linear RNN with input-dependent decay as prior: p_t(i) proportional to exp(g_{i+1} + ... + g_t), per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from femixer.conditioner import spread_decay_
from femixer.kernels.softplus import softplus
from femixer.layout import Layout
from femixer.priors.aft import ChannelPrior
from femixer.priors.base import Widths
from femixer.projection import Columns


class DecayPrior(ChannelPrior):
    """g = -softplus(x W + b), with b spread over memory spans of 2 to 1000 tokens in every head."""

    def __init__(self, heads: int, kv_heads: int, widths: Widths, *, causal: bool, **factory_kwargs: Any) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **factory_kwargs)
        self.decay_bias = nn.Parameter(torch.empty(heads, widths.value, **factory_kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for row in self.decay_bias:
            spread_decay_(row)

    def columns(self) -> dict[str, Columns]:
        return {"decay": Columns(self.heads * self.widths.value, additive=True)}

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        logits = inputs["decay"].to(dtype).unflatten(-1, self.decay_bias.shape)
        return {"gate": softplus(logits, self.decay_bias, scale=-1.0)}
