"""Time-decay conditioner (part C; paper appendix "Low-rank Convolution"): local context for prior and gates."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.kernels.conditioner import condition
from femixer.kernels.operator import handed_dtype
from femixer.layout import Layout
from femixer.projection import start_map, starting
from femixer.state import usable

EPS = 1e-5
SHORTEST_SPAN, LONGEST_SPAN = 2.0, 1000.0


def memory_spans(count: int) -> Tensor:
    """`count` spans in tokens, evenly spaced in log from 2 to 1000, float64; a single one is their geometric mean."""
    if count == 1:
        return torch.tensor([math.sqrt(SHORTEST_SPAN * LONGEST_SPAN)], dtype=torch.float64)
    return torch.logspace(math.log10(SHORTEST_SPAN), math.log10(LONGEST_SPAN), count, dtype=torch.float64)


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def spread_decay_(bias: Tensor) -> Tensor:
    """Fill a bias b in place so that softplus(b) = 1 / span, with the spans of `memory_spans`."""
    with torch.no_grad():
        return bias.copy_(inverse_softplus(1 / memory_spans(bias.numel())).view_as(bias))


def start_spread(linear: nn.Linear) -> None:
    """As `start_map`, but for the biases of the decays, the first third."""
    start_map(linear)
    spread_decay_(linear.bias[: linear.out_features // 3])


class TimeDecayConditioner(nn.Module):
    """SiLU(a_t / |a_t|) * LN(h_t), with h_t = sum_{i<=t} exp(-sum_{tau=i+1..t} s_tau) u_i: C features per token.

    s = softplus(LN(x) W_f + b), u = LN(x) W_x, a = softplus(LN(x) W_s). Encoder mode adds the same sum over later
    tokens, with the gates t..i-1. femixer.projection maps the features to the factors 1 + eta of each projection.
    """

    def __init__(
        self,
        dim: int,
        channels: int,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.channels, self.causal = dim, channels, causal
        self.in_proj = starting(nn.Linear(dim, 3 * channels, device=device, dtype=dtype), start_spread)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start_spread(self.in_proj)

    def forward(self, x: Tensor, layout: Layout, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, dim], state [B, C] -> (features [B, T, C], state after the last token)."""
        y = self.in_proj(F.layer_norm(x, (self.dim,), eps=EPS))
        state, marks = None if state is None else usable(state), layout.marks()
        return condition(y.to(handed_dtype(y)), marks, state, self.causal, EPS)
