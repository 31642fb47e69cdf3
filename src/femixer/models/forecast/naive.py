"""The forecasts that every other one must beat: they learn nothing."""

from __future__ import annotations

import torch
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
