"""Gated slot attention: softmax attention over a fixed number of slots, each a gated average of the past."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline, RMSNorm, check_sizes
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.operator import without_autocast
from femixer.layout import Layout

# Log decays are divided by this, as published.
CALM = 8.0


class Memory(NamedTuple):
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

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        slots: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        slots = dim // heads if slots is None else slots
        check_sizes(slots=slots)
        self.slots = slots
        made: dict[str, Any] = {"device": device, "dtype": dtype}
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
            gate = F.logsigmoid(logits).unflatten(-1, (self.heads, self.slots)) / CALM
            fresh = -torch.expm1(gate)
            scores, keys = linear_attention(q, k, fresh, gate, layout.marks(), keys, of_values=True, keep=keep)
            read, values = linear_attention(scores.softmax(-1), fresh, v, gate, layout.marks(), values, keep=keep)
            y = self.norm(F.silu(read.flatten(2)))
        memory = None if keys is None or values is None else Memory(keys, values)
        return self.out_proj(self.dropout(y.to(x.dtype))), memory
