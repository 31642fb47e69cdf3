"""Forgetting attention as prior: softmax attention whose scores decay by a forget gate at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from femixer.conditioner import spread_decay_
from femixer.kernels.softplus import softplus
from femixer.layout import Layout
from femixer.priors.base import Widths
from femixer.priors.softmax import SoftmaxPrior
from femixer.projection import Columns


class FoxPrior(SoftmaxPrior):
    """p_t(i) proportional to exp(<q_t, k_i> / sqrt(E) + log f_{i+1} + ... + log f_t), one forget gate f per head.

    log f = -softplus(logits + b), so f = sigmoid(-(logits + b)), with b spread over memory spans of 2 to 1000 tokens.
    For later tokens i, in encoder mode, the gates are those of t..i-1. Lin et al. 2025, arXiv 2503.02130.
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
        window: int | None = None,
        cache: str = "value",
        **factory_kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {"rope": rope, "rope_base": rope_base, "window": window, "cache": cache}
        super().__init__(heads, kv_heads, widths, causal=causal, **options, **factory_kwargs)
        self.decay_bias = nn.Parameter(torch.empty(heads, **factory_kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        spread_decay_(self.decay_bias)

    def columns(self) -> dict[str, Columns]:
        return {**super().columns(), "decay": Columns(self.heads, additive=True)}

    def log_decays(self, inputs: dict[str, Tensor], layout: Layout) -> Tensor:
        # float64, because their sums grow along the sequence while only differences of sums matter.
        decay = softplus(inputs["decay"], self.decay_bias, scale=-1.0).double()
        return decay if layout.padding is None else decay.masked_fill(layout.padding[..., None], 0)

    def _read_from(
        self,
        inputs: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        layout: Layout,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if beta is None:
            # The plain mean is read in the type of the values; in half precision a bias would be rounded by a gate.
            v, dtype = v.to(torch.promote_types(v.dtype, torch.float32)), None
        return super()._read_from(inputs, v, beta, layout, dtype)
