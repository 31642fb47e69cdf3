"""Linear attention: positive features of queries and keys in place of softmax, normalized."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines.base import Baseline
from femixer.baselines.kernels.linear_attention import linear_attention
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout
from femixer.options import check

FEATURE_MAPS = ("elu", "learned")
EPS = 1e-6


class LinearAttention(Baseline):
    """y_t = [S_tᵀ φ(q_t) / (<φ(q_t), z_t> + 1e-6)] W_o per head, with E = dim / heads and

        S_t = S_{t-1} + φ(k_t) v_tᵀ,    z_t = z_{t-1} + φ(k_t)

    feature_map="elu": φ(x) = elu(x) + 1. Katharopoulos et al. 2020, arXiv 2006.16236. 4 dim² parameters.
    feature_map="learned": φ(x) = [softmax(x W), softmax(-x W)], 2 E features, with matrices W per head for queries and
    for keys that start as identity (Hedgehog). Zhang et al. 2024, arXiv 2402.04347. 2 dim² / heads parameters more.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        feature_map: str = "elu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, heads, causal, dropout)
        check(feature_map in FEATURE_MAPS, "feature_map", feature_map, f"one of {', '.join(FEATURE_MAPS)}")
        self.width = width = dim // heads
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 3 * dim, bias=bias, **made)
        self.out_proj = nn.Linear(dim, dim, bias=bias, **made)
        self.feature_map: nn.Parameter | None = None  # of queries and of keys
        if feature_map == "learned":
            self.feature_map = nn.Parameter(torch.empty(2, heads, width, width, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.feature_map is not None:
            with torch.no_grad():
                self.feature_map.copy_(torch.eye(self.width).expand_as(self.feature_map))

    def mix(self, x: Tensor, layout: Layout, memory: Any, keep: bool) -> tuple[Tensor, Any]:
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, self.width)).unbind(2)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(x.device):
            q, k, v = self._features(q.to(dtype), 0), self._features(k.to(dtype), 1), v.to(dtype)
            # A value of one sums the keys.
            sums, state = linear_attention(q, k, F.pad(v, (0, 1), value=1.0), None, layout.marks(), memory, keep=keep)
            y = sums[..., :-1] / (sums[..., -1:] + EPS)
        return self.out_proj(self.dropout(y.flatten(2).to(x.dtype))), state

    def _features(self, x: Tensor, of: int) -> Tensor:
        """[B, T, H, E] -> [B, T, H, E or 2 E], positive."""
        if self.feature_map is None:
            return F.elu(x) + 1
        logits = torch.einsum("bthe,hef->bthf", x, self.feature_map[of].to(x.dtype))
        return torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)
