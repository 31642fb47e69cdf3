"""The model of a training, built from its specification."""

from __future__ import annotations

import torch
from huggingface_hub.errors import StrictDataclassError

from femixer.models.forecast import ForecastConfig, Forecaster, build
from femixer.tasks.forecast.dates import frequency_of
from femixer.tasks.forecast.experiment import Spec
from femixer.tasks.forecast.source import Series
from femixer.tasks.forecast.windows import Scaling, counted, scaling_of
from femixer.training import derive


def build_model(spec: Spec, series: Series, scaling: Scaling) -> Forecaster:
    """Starting weights depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(spec.seed, "weights"))
        try:
            return build(
                ForecastConfig(
                    **spec.fields,
                    channels=len(series.columns),
                    lookback=spec.lookback,
                    horizon=spec.horizon,
                    season=spec.season,
                    scaler_mean=scaling.mean.tolist(),
                    scaler_std=scaling.std.tolist(),
                    columns=[*series.columns],
                    date_column=series.date_column,
                    frequency=frequency_of(series.dates),
                    date_format=series.date_format,
                    missing_below=series.missing_below,
                )
            )
        except StrictDataclassError as error:  # how transformers wraps what the configuration says
            raise ValueError(str(error.__cause__ or error)) from error


def check_possible(spec: Spec, series: Series) -> None:
    """A ValueError unless there are windows and the model can be built: before anything is written."""
    counted(series, spec.lookback, spec.horizon)
    with torch.device("meta"):
        build_model(spec, series, scaling_of(series))
