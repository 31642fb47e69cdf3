"""Published forecasters that are trained as FEMForecaster is: DLinear, NLinear, PatchTST and iTransformer.

None has a mask: gaps are filled with the last observed value before them (the first one after them at the start).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines import Attention
from femixer.models.forecast.config import ForecastConfig, Sizes
from femixer.models.forecast.forecaster import Dropout, Forecaster
from femixer.models.forecast.window import filled, last_value, normalised
from femixer.options import check

AVERAGED, PATCH, STRIDE = 25, 16, 8


class Published(Forecaster):
    """A forecaster whose linear maps start as torch starts them, as its published code does; ours start N(0, 0.02)."""

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


class DLinear(Published):
    """Zeng et al. 2023, "Are Transformers Effective for Time Series Forecasting?": maps shared by the channels.

    trend = moving average of 25 points (the ends repeated); forecast = trend W_t + b_t + (x - trend) W_s + b_s
    """

    kind = "dlinear"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        self.seasonal = nn.Linear(config.lookback, config.horizon)
        self.trend = nn.Linear(config.lookback, config.horizon)
        self.post_init()

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        x = filled(window, observed).transpose(1, 2)
        trend = F.avg_pool1d(F.pad(x, (AVERAGED // 2, AVERAGED // 2), mode="replicate"), AVERAGED, stride=1)
        return (self.seasonal(x - trend) + self.trend(trend)).transpose(1, 2)


class NLinear(Published):
    """Of the same paper: forecast = last + (x - last) W + b. The level of a window is taken out and put back."""

    kind = "nlinear"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(config.lookback, config.horizon)
        self.post_init()

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        last = last_value(window, observed)
        return last + self.linear((filled(window, observed) - last).transpose(1, 2)).transpose(1, 2)


class PatchTST(Published):
    """The supervised one of Nie et al. 2023, "A Time Series is Worth 64 Words" (yuqinie98/PatchTST).

    Every channel by itself, weights shared: overlapping patches as tokens, an encoder, one linear map of all tokens.

        x = (window - mean) / std (RevIN), its last value repeated 8 times at the end
        token_i = x[8 i : 8 i + 16] W + position_i;   h = encoder(tokens);   forecast = flatten(h) W_o, RevIN undone

    As published with BatchNorm in place of LayerNorm and with the scores of a layer added to those of the next. Mean
    and std are those of the observed points.
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
        self.layers = nn.ModuleList(PatchLayer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(patches * sizes.width, config.horizon)
        self.post_init()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.positions.weight, -0.02, 0.02)

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        norm = normalised(window, observed)
        patches = F.pad(norm.values, (0, STRIDE), mode="replicate").unfold(-1, PATCH, STRIDE)
        x = self.dropout(self.embedding(patches).flatten(0, 1) + self.positions.weight)
        scored: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x, scored = layer(x, scored)
        return norm.undone(self.head(x.flatten(1)).unflatten(0, patches.shape[:2]))


class PatchLayer(nn.Module):
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


class ITransformer(Published):
    """Liu et al. 2024, "Inverted Transformers Are Effective for Time Series Forecasting".

    A token is the whole window of a channel: channels attend to each other, and each is mapped to its forecast.

        x = (window - mean) / std;   token_c = x_c W;   h = encoder(tokens);   forecast_c = h_c W_o, the norm undone

    Without the tokens of calendar features: no forecaster here has any. A channel without any observed point is masked.
    Mean and std are those of the observed points.
    """

    kind = "itransformer"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        sizes = config.sizes()
        self.embedding = nn.Linear(config.lookback, sizes.width)
        self.dropout = Dropout(sizes.dropout)
        self.layers = nn.ModuleList(ChannelLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, config.horizon)
        self.post_init()

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        norm = normalised(window, observed)
        mask = None if observed is None else observed.any(1)
        x = self.dropout(self.embedding(norm.values))
        for layer in self.layers:
            x = layer(x, mask)
        return norm.undone(self.head(self.norm(x)))


class ChannelLayer(nn.Module):
    """x = norm(x + attention(x)), x = norm(x + W_2 gelu(x W_1)), [B, C, dim]; no positions: channels have no order."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, width = sizes.width, sizes.intermediate
        self.attention = Attention(dim, sizes.heads, causal=False, rope=False)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
        self.dropout = Dropout(sizes.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask=mask)))
        hidden = self.dropout(F.gelu(self.up(x)))
        return self.mlp_norm(x + self.dropout(self.down(hidden)))
