"""What definitions of rivals, written out token by token, are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def unit_length(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def earlier(x: Tensor, tokens: int) -> Tensor:
    return F.pad(x, (0, 0, tokens, 0))[:, : x.shape[1]]


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """sum_j weight_j x_{t-j}"""
    return sum(taps * earlier(x, j) for j, taps in enumerate(weight))  # type: ignore[return-value]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """S = alpha_t S, S = S + beta_t k_t (v_t - Sᵀ k_t)ᵀ, y_t = Sᵀ q_t: y [B, T, H, D] and the last S.

    alpha [B, T, H, E or 1], beta [B, T, H]."""
    s, y = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        s = alpha[:, t, :, :, None] * s
        error = v[:, t] - torch.einsum("bhed,bhe->bhd", s, k[:, t])
        s = s + torch.einsum("bh,bhe,bhd->bhed", beta[:, t], k[:, t], error)
        y.append(torch.einsum("bhed,bhe->bhd", s, q[:, t]))
    return torch.stack(y, 1), s
