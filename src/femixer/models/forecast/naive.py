"""The forecasts that every other one must beat: they learn nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.models.forecast.config import ForecastConfig
from femixer.models.forecast.forecaster import Forecaster
from femixer.models.forecast.window import last_value


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
            seen = torch.ones_like(window, dtype=torch.bool) if observed is None else observed
            # [B, seasons, season, C]: of each phase the latest season in which it was observed.
            seen, values = (F.pad(x, (0, 0, before, 0)).unflatten(1, (-1, season)) for x in (seen, window))
            at = seasons - 1 - seen.flip(1).long().argmax(1, keepdim=True)
            latest = values.gather(1, at).squeeze(1).where(seen.any(1), last_value(window, observed))
        return latest.repeat(1, -(-horizon // season), 1)[:, :horizon]
