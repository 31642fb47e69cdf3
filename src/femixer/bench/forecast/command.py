"""Measure, show the table, and write forecast.json and forecast.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from femixer.bench.forecast.options import RIVAL, Options
from femixer.bench.forecast.tables import table
from femixer.bench.steps import Report, StepCost, measured, race_of_steps
from femixer.bench.training import Training
from femixer.models.forecast import ForecastConfig, build
from femixer.models.named import NAMED
from femixer.options import parse


class Fitting(Training):
    """A forecaster learns from the sum of its losses."""

    def step(self) -> None:
        sum(self.call(**self.batch).values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench forecast")
    table(run(options), options.targets).show()
    print(f"Results are in {options.out}/")
    return 0


def run(options: Options) -> Report:
    options.validate()
    return measured("forecast", options, lambda: measure(options), table)


def measure(options: Options) -> list[StepCost]:
    made: Any = options.tensors
    history, future = (
        torch.randn(options.batch, rows, options.channels, **made) for rows in (options.lookback, options.horizon)
    )
    field = {}
    for model in (RIVAL, *options.models):
        sizes: dict[str, Any] = {"channels": options.channels, "lookback": options.lookback, "horizon": options.horizon}
        forecaster = build(ForecastConfig(kind="fem", **sizes, **NAMED[model])).to(**made)
        field[model] = Fitting.start(forecaster, {"history": history, "future": future}, compiled=False)
    return race_of_steps(field, {model: model for model in field}, RIVAL, options.rounds, options.warmup)
