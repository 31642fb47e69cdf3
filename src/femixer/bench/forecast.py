"""`femixer bench forecast`: forecasters with FEM against the same forecaster with plain attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from femixer.bench.measure import BenchOptions, check_distinct
from femixer.bench.models import Report, StepCost, Training, race_of_steps
from femixer.bench.report import command, fits, measured, place_of, ratio_cell
from femixer.models.forecast import ForecastConfig, build
from femixer.models.named import NAMED
from femixer.options import check, check_positive
from femixer.reporting import Table

RIVAL = "SMAttn"


@dataclass(frozen=True)
class Options(BenchOptions):
    """Forecasters: the time of a training step, as ratio to the same model with plain attention.

    Every ratio compares two samples of the same round, and the table gives the median over the rounds with the
    quartiles. The results are forecast.json and forecast.md.
    """

    batch: int = 32
    """Windows of a step."""
    rounds: int = 15
    """Rounds measured; a round is one step of every model."""
    warmup: int = 3
    """Rounds before that, not counted."""
    channels: int = 7
    """Channels of the series."""
    lookback: int = 1024
    """Rows to forecast from."""
    horizon: int = 96
    """Rows to forecast."""
    windows: int = 7521
    """Windows of an epoch, whose time is worked out from that of a step; ETTh1 has so many at 1024 and 96."""
    models: tuple[str, ...] = ("FEM-SM",)
    """Models by their names in the paper's tables, besides SMAttn, plain attention."""

    def validate(self) -> None:
        super().validate()
        check_positive(channels=self.channels, lookback=self.lookback, horizon=self.horizon, windows=self.windows)
        check_distinct("models", self.models)
        others = [name for name in NAMED if name != RIVAL]
        for model in self.models:
            check(model in others, "models", model, f"names among {', '.join(others)}")


def measure(options: Options) -> Mapping[str, Sequence[Any]]:
    made: Any = options.tensors
    history, future = (
        torch.randn(options.batch, rows, options.channels, **made) for rows in (options.lookback, options.horizon)
    )
    batch = {"history": history, "future": future}
    sizes: dict[str, Any] = {"channels": options.channels, "lookback": options.lookback, "horizon": options.horizon}
    field = {}
    for model in (RIVAL, *options.models):
        forecaster = build(ForecastConfig(kind="fem", **sizes, **NAMED[model])).to(**made)
        field[model] = Training.start(forecaster, batch, loss=lambda losses: sum(losses.values()))
    return race_of_steps(field, str, RIVAL, options)


# The most that FEM-SM may take of plain attention's time, and the size that is meant for.
TARGET = 1.2
SIZE = {"channels": 7, "lookback": 1024, "horizon": 96, "batch": 32, "dtype": "float32", "device": "cpu"}


def target(cost: StepCost, report: Report) -> float | None:
    """None where there is none."""
    return TARGET if cost.key == "FEM-SM" and fits(report.settings, SIZE) else None


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    title = (
        f"Training: look-back {s['lookback']}, horizon {s['horizon']}, {s['channels']} channels, batch {s['batch']}, "
        f"{place_of(report)}"
    )
    header = [
        "model",
        "parameters",
        "ms per step",
        f"seconds per {s['windows']:,} windows",
        "ratio to plain attention (smaller is better)",
    ]
    yield Table.of(header, [_row(cost, report, targets) for cost in report.training], title)


def _row(cost: StepCost, report: Report, targets: bool) -> list[str]:
    steps = -(-report.settings["windows"] // report.settings["batch"])
    return [
        cost.name,
        f"{cost.parameters:,}",
        f"{cost.seconds.median * 1e3:.0f}",
        f"{cost.seconds.median * steps:.1f}",
        "1" if cost.key == RIVAL else ratio_cell(cost.ratio, target(cost, report) if targets else None),
    ]


def run(options: Options) -> Report:
    options.validate()
    return measured("forecast", options, lambda: measure(options), Report, tables)


def main(args: Sequence[str]) -> int:
    return command("forecast", Options, args, run, tables)
