"""Measure, show the table, and write forecast.json and forecast.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from femixer.bench.environment import environment
from femixer.bench.forecast.options import RIVAL, Options
from femixer.bench.forecast.tables import table
from femixer.bench.measure import cpu_threads
from femixer.bench.steps import Report, StepCost, race_of_steps
from femixer.bench.training import Training
from femixer.models.forecast import ForecastConfig, build
from femixer.models.named import NAMED
from femixer.options import parse
from femixer.training import atomic


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
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads:
        torch.manual_seed(options.seed)
        training = measure(options)
        surroundings = environment(threads, options.device)
    settings = asdict(options)
    del settings["out"], settings["targets"]
    report = Report(settings, surroundings, training)
    written = json.dumps({"benchmark": "forecast", **asdict(report)}, indent=2) + "\n"
    atomic.write(options.out / "forecast.json", written)
    atomic.write(options.out / "forecast.md", table(report, options.targets).markdown() + "\n")
    return report


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
