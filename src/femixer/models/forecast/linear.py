"""DLinear and NLinear (Zeng et al. 2023, "Are Transformers Effective for Time Series Forecasting?").

Their maps look-back -> horizon are shared by the channels. They have no mask: gaps are filled with the last observed
value before them (the first one after them at the start).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.forecast.config import ForecastConfig
from femixer.models.forecast.forecaster import Forecaster, start_as_torch
from femixer.models.forecast.window import filled, last_value

AVERAGED = 25


class DLinear(Forecaster):
    """trend = moving average of 25 points (the ends repeated); forecast = trend W_t + b_t + (x - trend) W_s + b_s."""

    kind = "dlinear"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        self.seasonal = nn.Linear(config.lookback, config.horizon)
        self.trend = nn.Linear(config.lookback, config.horizon)
        self.post_init()

    def reset_parameters(self) -> None:
        start_as_torch(self)

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        x = filled(window, observed).transpose(1, 2)
        trend = F.avg_pool1d(F.pad(x, (AVERAGED // 2, AVERAGED // 2), mode="replicate"), AVERAGED, stride=1)
        return (self.seasonal(x - trend) + self.trend(trend)).transpose(1, 2)


class NLinear(Forecaster):
    """forecast = last + (x - last) W + b: the level of a window, its last value, is taken out and put back."""

    kind = "nlinear"

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(config.lookback, config.horizon)
        self.post_init()

    def reset_parameters(self) -> None:
        start_as_torch(self)

    def forecast(self, window: Tensor, observed: Tensor | None) -> Tensor:
        last = last_value(window, observed)
        return last + self.linear((filled(window, observed) - last).transpose(1, 2)).transpose(1, 2)
