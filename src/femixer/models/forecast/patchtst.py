"""PatchTST, the supervised one (Nie et al. 2023, "A Time Series is Worth 64 Words", yuqinie98/PatchTST)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.forecast.config import ForecastConfig, Sizes
from femixer.models.forecast.dropout import Dropout
from femixer.models.forecast.forecaster import Forecaster, start_as_torch
from femixer.models.forecast.window import normalised
from femixer.options import check

PATCH, STRIDE = 16, 8


class PatchTST(Forecaster):
    """Every channel by itself, weights shared: overlapping patches as tokens, an encoder, one linear map of all tokens.

        x = (window - mean) / std (RevIN), its last value repeated 8 times at the end
        token_i = x[8 i : 8 i + 16] W + position_i;   h = encoder(tokens);   forecast = flatten(h) W_o, RevIN undone

    As published with BatchNorm in place of LayerNorm and with the scores of a layer added to those of the next. It has
    no mask: gaps are filled with the last observed value before them (the first one after them at the start), though
    mean and std are those of the observed points.
    """

    kind = "patchtst"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        check(config.lookback >= PATCH, "lookback", config.lookback, f"at least {PATCH} points for PatchTST")
        sizes = config.sizes()
        patches = (config.lookback - PATCH) // STRIDE + 2
        self.embedding = nn.Linear(PATCH, sizes.width)
        self.positions = nn.Embedding(patches, sizes.width)
        self.dropout = Dropout(sizes.dropout)
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(patches * sizes.width, config.horizon)
        self.post_init()

    def reset_parameters(self) -> None:
        start_as_torch(self)
        nn.init.uniform_(self.positions.weight, -0.02, 0.02)

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        norm = normalised(window, observed)
        patches = F.pad(norm.values, (0, STRIDE), mode="replicate").unfold(-1, PATCH, STRIDE)
        x = self.dropout(self.embedding(patches).flatten(0, 1) + self.positions.weight)
        scored: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x, scored = layer(x, scored)
        return norm.undone(self.head(x.flatten(1)).unflatten(0, patches.shape[:2]))


class EncoderLayer(nn.Module):
    """x = norm(x + attention(x)), x = norm(x + W_2 gelu(x W_1)), with residual attention: scores are added up.

    They need not be kept for that: the sum of q_l k_l^T over layers is the product of the q_l and k_l side by side.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, width = sizes.width, sizes.intermediate
        self.heads = sizes.heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
        self.attention_norm, self.mlp_norm = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.dropout = Dropout(sizes.dropout)
        # Once in the attention and once on the residual branch, as published: kept by both, or dropped.
        self.twice = Dropout(1 - (1 - sizes.dropout) ** 2)

    def forward(self, x: Tensor, scored: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B C, T, dim]; scored: queries and keys [2, B C, heads, T, dim / heads] of the layers below."""
        pair, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).split((2, 1))
        scored = (*scored, pair)
        q, k = torch.cat(scored, -1)
        size = v.shape[-1]
        # One width for all three: what the kernel that never writes the scores asks for.
        v = F.pad(v[0], (0, q.shape[-1] - size))
        read = F.scaled_dot_product_attention(q, k, v, scale=size**-0.5)[..., :size].transpose(1, 2).flatten(2)
        x = per_channel(self.attention_norm, x + self.twice(self.out(read)))
        hidden = self.dropout(F.gelu(self.up(x)))
        return per_channel(self.mlp_norm, x + self.dropout(self.down(hidden))), scored


def per_channel(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """BatchNorm of [B, T, dim] over all tokens of the batch."""
    out: Any = norm(x.flatten(0, 1))
    return out.view_as(x)
