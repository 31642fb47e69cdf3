"""iTransformer (Liu et al. 2024, "Inverted Transformers Are Effective for Time Series Forecasting")."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines import Attention
from femixer.models.forecast.config import ForecastConfig, Sizes
from femixer.models.forecast.dropout import Dropout
from femixer.models.forecast.forecaster import Forecaster, start_as_torch
from femixer.models.forecast.window import normalised


class ITransformer(Forecaster):
    """A token is the whole window of a channel: channels attend to each other, and each is mapped to its forecast.

        x = (window - mean) / std;   token_c = x_c W;   h = encoder(tokens);   forecast_c = h_c W_o, the norm undone

    Without the tokens of calendar features: no forecaster here has any. A channel without any observed point is masked;
    other gaps are filled with the last observed value before them (the first one after them at the start), though mean
    and std are those of the observed points.
    """

    kind = "itransformer"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        sizes = config.sizes()
        self.embedding = nn.Linear(config.lookback, sizes.width)
        self.dropout = Dropout(sizes.dropout)
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, config.horizon)
        self.post_init()

    def reset_parameters(self) -> None:
        start_as_torch(self)

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        norm = normalised(window, observed)
        mask = None if observed is None else observed.any(1)
        x = self.dropout(self.embedding(norm.values))
        for layer in self.layers:
            x = layer(x, mask)
        return norm.undone(self.head(self.norm(x)))


class EncoderLayer(nn.Module):
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
