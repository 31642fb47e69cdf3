"""Forecasters: a window of several series in, the next points of all of them out.

FEMForecaster with any mixer, and the rivals that every table of forecasts should have, behind one interface.
"""

from femixer.models.forecast.fem import FEMForecaster
from femixer.models.forecast.forecaster import KINDS, ForecastConfig, Forecaster
from femixer.models.forecast.rivals import ETS, DLinear, ITransformer, LastValue, NLinear, PatchTST, SeasonalNaive

FORECASTERS: dict[str, type[Forecaster]] = {
    made.kind: made for made in (FEMForecaster, DLinear, NLinear, PatchTST, ITransformer, LastValue, SeasonalNaive, ETS)
}
"""By the names of `ForecastConfig.kind`."""


def build(config: ForecastConfig) -> Forecaster:
    """The forecaster that config.kind names, with new weights."""
    return FORECASTERS[config.kind](config)


__all__ = [
    "ETS",
    "FORECASTERS",
    "KINDS",
    "DLinear",
    "FEMForecaster",
    "ForecastConfig",
    "Forecaster",
    "ITransformer",
    "LastValue",
    "NLinear",
    "PatchTST",
    "SeasonalNaive",
    "build",
]
