"""The cost of a training step, as `femixer bench vision` and `femixer bench forecast` write it to their JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from femixer.bench.environment import environment
from femixer.bench.measure import Spread, cpu_threads, paired_ratio, race
from femixer.bench.options import BenchOptions
from femixer.bench.progress import progress
from femixer.bench.table import Table
from femixer.bench.training import Training
from femixer.training import atomic


@dataclass(frozen=True)
class StepCost:
    """Forward, backward and a step of AdamW: seconds, and their ratio to the rival's of the same round.

    name: as the table shows it; key: as it was asked for. samples: seconds, one per round.
    """

    name: str
    key: str
    parameters: int
    seconds: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, name: str, key: str, parameters: int, samples: Sequence[float], rival: Sequence[float]) -> StepCost:
        return cls(name, key, parameters, Spread.of(samples), paired_ratio(samples, rival), samples)


@dataclass(frozen=True)
class Report:
    settings: dict[str, Any]
    environment: dict[str, Any]
    training: list[StepCost]


def race_of_steps(
    field: Mapping[str, Training], names: Mapping[str, str], rival: str, rounds: int, warmup: int
) -> list[StepCost]:
    """The models by key, one step each in every round."""
    samples = {key: training.time for key, training in field.items()}
    with progress("training", warmup + rounds) as advance:
        seconds = race(samples, rounds, warmup, advance)
    return [
        StepCost.of(names[key], key, training.parameters, seconds[key], seconds[rival])
        for key, training in field.items()
    ]


def measured(
    benchmark: str,
    options: BenchOptions,
    measure: Callable[[], list[StepCost]],
    table: Callable[[Report, bool], Table],
    **settings: Any,
) -> Report:
    """Measure and write BENCHMARK.json and BENCHMARK.md; settings: what the options leave to a default."""
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads:
        torch.manual_seed(options.seed)
        training = measure()
        surroundings = environment(threads, options.device)
    settings = {**asdict(options), **settings}
    del settings["out"], settings["targets"]
    report = Report(settings, surroundings, training)
    written = json.dumps({"benchmark": benchmark, **asdict(report)}, indent=2) + "\n"
    atomic.write(options.out / f"{benchmark}.json", written)
    atomic.write(options.out / f"{benchmark}.md", table(report, options.targets).markdown() + "\n")
    return report
