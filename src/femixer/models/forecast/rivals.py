"""What FEMForecaster is compared with: published forecasters that are trained as it is (DLinear, NLinear, PatchTST and
iTransformer), and forecasts without a network, which all others must beat: the last value, the last season, exponential
smoothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.baselines import Attention
from femixer.models.forecast.forecaster import Dropout, ForecastConfig, Forecaster
from femixer.models.forecast.window import filled, last_value, normalised
from femixer.optional import require
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
        layers, heads, dim, inner, dropout = config.sizes()
        patches = (config.lookback - PATCH) // STRIDE + 2
        self.embedding = nn.Linear(PATCH, dim)
        self.positions = nn.Embedding(patches, dim)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(PatchLayer(heads, dim, inner, dropout) for _ in range(layers))
        self.head = nn.Linear(patches * dim, config.horizon)
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

    def __init__(self, heads: int, dim: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
        self.attention_norm, self.mlp_norm = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.dropout = Dropout(dropout)
        # Once in the attention and once on the residual branch, as published: kept by both, or dropped.
        self.twice = Dropout(1 - (1 - dropout) ** 2)

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
        layers, heads, dim, inner, dropout = config.sizes()
        self.embedding = nn.Linear(config.lookback, dim)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(ChannelLayer(heads, dim, inner, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, config.horizon)
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

    def __init__(self, heads: int, dim: int, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, causal=False, rope=False)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask=mask)))
        hidden = self.dropout(F.gelu(self.up(x)))
        return self.mlp_norm(x + self.dropout(self.down(hidden)))


class Naive(Forecaster):
    """A forecaster without weights."""

    trainable = False

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        # transformers asks the parameters for device and dtype, and saves no model that has none at all.
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        self.post_init()


class LastValue(Naive):
    """The last observed value of each channel, for the whole horizon."""

    kind = "last-value"

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        return last_value(window, observed).expand(-1, self.config.horizon, -1)


class SeasonalNaive(Naive):
    """x_{t+h} = x_{t+h-k season} with the smallest k for which it was observed; the last value where it never was."""

    kind = "seasonal-naive"

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        season, horizon = self.config.season, self.config.horizon
        seasons = -(-window.shape[1] // season)
        before = seasons * season - window.shape[1]
        latest = window[:, -season:]
        if observed is not None or latest.shape[1] < season:
            # Places [seasons, phases] in the window, of the phases that are forecast; a season may be longer than both.
            phases = torch.arange(min(season, horizon), device=window.device)
            place = season * torch.arange(seasons, device=window.device)[:, None] + phases - before
            seen = (place >= 0)[None, :, :, None].expand(len(window), -1, -1, window.shape[2])
            place = place.clamp(min=0)
            seen = seen if observed is None else seen & observed[:, place]
            # [B, seasons, phases, C]: of each phase the latest season in which it was observed.
            at = seasons - 1 - seen.flip(1).long().argmax(1, keepdim=True)
            latest = window[:, place].gather(1, at).squeeze(1).where(seen.any(1), last_value(window, observed))
        return latest.repeat(1, -(-horizon // season), 1)[:, :horizon]


ROWS = 2000
"""Training rows, the last ones, of which the smoothing is estimated; further ones hardly change it."""
SERIES = 50
"""Of many series, those whose estimates count at most, evenly chosen."""
START = (0.5, 0.0, 0.0, 0.98)
"""Where nothing can be estimated: a constant, or too few rows."""


class ETS(Forecaster):
    """Additive error, damped additive trend, additive season (Hyndman's ETS(A,Ad,A)), each channel by itself:

        e_t = x_t - (l + phi b + s_{t-m});   l <- l + phi b + alpha e;   b <- phi b + beta e;   s_t <- s_{t-m} + gamma e
        forecast_h = l + (phi + ... + phi^h) b + s of its phase

    m: the season of the configuration. alpha, beta, gamma, phi of each channel maximise the likelihood of the training
    rows (statsmodels); the states start from the first two seasons of a window and follow it. Where a value is missing,
    e = 0.
    """

    kind = "ets"
    trainable = False

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        self.smoothing = nn.Parameter(torch.empty(config.channels, 4), requires_grad=False)
        self.post_init()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.smoothing.copy_(torch.tensor(START).expand_as(self.smoothing))

    def estimate(self, rows: Sequence[np.ndarray]) -> None:
        """Of training rows [T, C], or of those of many series: then the medians over series."""
        season = self.config.season
        chosen = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SERIES)).round().astype(int))]
        found = [[smoothing_of(column, season) for column in each[-ROWS:].T] for each in chosen]
        with torch.no_grad():
            self.smoothing.copy_(torch.tensor(np.median(found, 0)))

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        season = self.config.season if window.shape[1] >= 2 * self.config.season else 1
        alpha, beta, gamma, phi = self.smoothing.to(window.dtype).unbind(1)
        if season == 1:
            gamma = torch.zeros_like(gamma)
        level, trend, phases = started(filled(window, observed), season)
        for time, x in enumerate(window.unbind(1)):
            place = time % season
            level = level + phi * trend
            error = x - (level + phases[place])
            if observed is not None:
                error = error.masked_fill(~observed[:, time], 0)
            level, trend = level + alpha * error, phi * trend + beta * error
            phases[place] = phases[place] + gamma * error
        forecast = []
        for time in range(window.shape[1], window.shape[1] + self.config.horizon):
            trend = phi * trend
            level = level + trend
            forecast.append(level + phases[time % season])
        return torch.stack(forecast, 1)


def started(window: Tensor, season: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Level and trend [B, C] before the first row, and the season's phases, of the window's first two seasons."""
    if season == 1:
        level = window[:, 0]
        return level, torch.zeros_like(level), [torch.zeros_like(level)]
    first, second = window[:, :season], window[:, season : 2 * season]
    trend = (second.mean(1) - first.mean(1)) / season
    middle = torch.arange(season, device=window.device, dtype=window.dtype)[:, None] - (season - 1) / 2
    around = (
        torch.stack([part - part.mean(1, keepdim=True) for part in (first, second)]).mean(0) - trend[:, None] * middle
    )
    return first.mean(1) - trend * (season + 1) / 2, trend, [*around.unbind(1)]


def smoothing_of(values: np.ndarray, season: int) -> tuple[float, float, float, float]:
    """alpha, beta, gamma and phi of one column, its gaps filled with the value before."""
    seen = ~np.isnan(values)
    if seen.sum() < 10 or np.ptp(values[seen]) < 1e-9:
        return START
    values = values[np.maximum.accumulate(np.where(seen, np.arange(len(values)), int(seen.argmax())))]
    seasonal = season > 1 and len(values) >= max(2 * season, 10 + 2 * (season // 2))
    smoother = require("statsmodels.tsa.exponential_smoothing.ets", "forecast").ETSModel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a flat likelihood has no clear maximum
        found = smoother(
            values,
            error="add",
            trend="add",
            damped_trend=True,
            seasonal="add" if seasonal else None,
            seasonal_periods=season if seasonal else None,
            initialization_method="heuristic",
        ).fit(disp=False)
    by_name = dict(zip(found.param_names, found.params, strict=True))
    names = ("smoothing_level", "smoothing_trend", "smoothing_seasonal", "damping_trend")
    estimates = [float(by_name.get(name, 0.0)) for name in names]
    return tuple(estimates) if np.isfinite(estimates).all() else START  # type: ignore[return-value]
