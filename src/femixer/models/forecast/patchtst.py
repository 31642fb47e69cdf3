"""PatchTST, the supervised one (Nie et al. 2023, "A Time Series is Worth 64 Words", yuqinie98/PatchTST)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.forecast.config import ForecastConfig, Sizes
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
        self.dropout = nn.Dropout(sizes.dropout)
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
        scores = None
        for layer in self.layers:
            x, scores = layer(x, scores)
        return norm.undone(self.head(x.flatten(1)).unflatten(0, patches.shape[:2]))


class EncoderLayer(nn.Module):
    """x = norm(x + attention(x)), x = norm(x + W_2 gelu(x W_1)), with residual attention: scores are added up."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, width = sizes.width, sizes.intermediate
        self.heads = sizes.heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
        self.attention_norm, self.mlp_norm = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B C, T, dim]; before: scores [B C heads, T, T] of the layer below."""
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        # The scores are by far the largest tensors here: nothing is done to them that can be done to the queries.
        q = q * q.shape[-1] ** -0.5
        scores = q @ k.mT if before is None else torch.baddbmm(before, q, k.mT)
        read = (scores.softmax(-1) @ v).unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)
        # Twice, as published: once in the attention and once on the residual branch.
        x = per_channel(self.attention_norm, x + self.dropout(self.dropout(self.out(read))))
        hidden = self.dropout(F.gelu(self.up(x)))
        return per_channel(self.mlp_norm, x + self.dropout(self.down(hidden))), scores


def per_channel(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """BatchNorm of [B, T, dim] over all tokens of the batch."""
    out: Any = norm(x.flatten(0, 1))
    return out.view_as(x)
