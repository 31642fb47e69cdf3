"""`femixer bench vision` and `femixer bench forecast`: the training step of vision models and of forecasters with FEM,
against the same model with plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from femixer.bench.calls import Training
from femixer.bench.contestants import ATTENTION, canonical, check_priors, full_label
from femixer.bench.measure import (
    Benchmark,
    BenchOptions,
    Spread,
    Timing,
    fits,
    ratio_cell,
    timed,
    unlimited_compilation,
)
from femixer.bench.measure import Report as BenchReport
from femixer.models import VISION_PRESETS, FEMForImageClassification, FEMVisionConfig, preset
from femixer.models.config import plain_refusals
from femixer.models.forecast import ForecastConfig, build
from femixer.models.named import NAMED, parameter_count
from femixer.models.vision import POSITIONS
from femixer.options import Count, Whole, check, check_different, given
from femixer.priors import parse_prior
from femixer.reporting import Table


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step, and their ratio to the rival's of the same round.

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
        return cls(name, key, parameters, **vars(Timing.of(samples, rival)))


@dataclass(frozen=True)
class Report(BenchReport):
    training: list[StepCost]


def race(
    field: Mapping[str, Training], name: Callable[[str], str], options: BenchOptions
) -> dict[str, Sequence[StepCost]]:
    """The models by key, the rival first, one step each in every round; name: what the table calls a key."""
    seconds = timed("training", {key: training.time for key, training in field.items()}, options)
    rival = seconds[next(iter(field))]
    return {
        "training": [StepCost.of(name(key), key, each.parameters, seconds[key], rival) for key, each in field.items()]
    }


def table(report: Report, title: str, speed: str, shown: Callable[[float], str], target: dict[str, float]) -> Table:
    """speed: of what `shown` makes of the seconds of a step; target: by key, the largest ratio."""
    rows = []
    for number, cost in enumerate(report.training):
        seconds = cost.seconds.median
        ratio = ratio_cell(cost.ratio, target.get(cost.key)) if number else "1"
        rows.append([cost.name, f"{cost.parameters:,}", f"{seconds * 1e3:.0f}", shown(seconds), ratio])
    header = ("model", "parameters", "ms per step", speed, "ratio to plain attention (smaller is better)")
    return Table.of(header, rows, f"{title}, {report.place()}")


# Vision models


@dataclass(frozen=True)
class Vision(BenchOptions):
    """Vision models: the time of a training step, as ratio to the same model with plain attention.

    Every ratio compares two samples of the same round, and the table gives the median over the rounds with the
    quartiles. The results are vision.json and vision.md.
    """

    batch: Count = 8
    """Images of a step."""
    rounds: Count = 10
    """Rounds measured; a round is one step of every model."""
    warmup: Whole = 2
    preset: str = "deit-tiny"
    """Size of the models: deit-tiny, deit-small or digits."""
    image_size: Count | None = None
    """Height and width of the images (default: the preset's)."""
    positions: str = "learned"
    """Positions of the patches: learned or rotary."""
    priors: tuple[str, ...] = ("softmax", "gla")
    """The priors of FEM, each alone or with options: gla, gla:decay=channel, name:option=value,option=value."""
    parts: str = "CLTG"
    """Parts of FEM: a subset of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    compile: bool = False
    """Train with torch.compile, whose own time is not counted."""

    @property
    def contestants(self) -> tuple[str, ...]:
        """Priors as on the command line, the rival first."""
        return (ATTENTION, *self.priors)

    def validate(self) -> None:
        super().validate()
        check(self.preset in VISION_PRESETS, "preset", self.preset, f"one of {', '.join(VISION_PRESETS)}")
        check(self.positions in POSITIONS, "positions", self.positions, f"one of {', '.join(POSITIONS)}")
        check_priors(self)
        with plain_refusals():
            for prior in self.contestants:  # an option that does not fit shows now, not after the models before it
                parameter_count(self.config(prior))

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "image_size": self.config(ATTENTION).image_size}

    def config(self, prior: str) -> FEMVisionConfig:
        size = given(positions=self.positions, image_size=self.image_size)
        if prior == ATTENTION:
            return preset(self.preset, **size, mixer="attention")
        name, options = parse_prior(prior)
        return preset(self.preset, **size, prior=name, parts=self.parts, prior_options={name: options})

    def model(self, prior: str) -> FEMForImageClassification:
        model = FEMForImageClassification(self.config(prior))
        model.to(**self.tensors)
        return model

    def images(self) -> dict[str, Tensor]:
        """A batch of noise, with a class for each image."""
        size: Any = self.config(ATTENTION)
        shape = (self.batch, size.num_channels, size.image_size, size.image_size)
        labels = torch.randint(size.num_labels, (self.batch,), device=self.device)
        return {"pixel_values": torch.randn(shape, **self.tensors), "labels": labels}

    def name(self, prior: str) -> str:
        return "plain attention" if prior == ATTENTION else full_label(prior, self.parts)


def measure_vision(options: Vision) -> dict[str, Sequence[StepCost]]:
    batch = options.images()
    field = {prior: Training.start(options.model(prior), batch, options.compile) for prior in options.contestants}
    with unlimited_compilation(options.compile):
        return race(field, options.name, options)


# The most that FEM with the softmax prior may take of plain attention's time, and the size that is meant for.
VISION_TARGET = 1.15
VISION_SIZE = {"preset": "deit-tiny", "image_size": 224, "batch": 8, "parts": "CLTG", "positions": "learned"}
VISION_SIZE |= {"dtype": "float32", "device": "cpu"}


def vision_tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    softmax = [prior for prior in s["priors"] if canonical(prior) == "softmax"]
    title = (
        f"Training, {'compiled' if s['compile'] else 'eager'}: {s['preset']}, {s['image_size']} x {s['image_size']} "
        f"pixels, batch {s['batch']}, {s['positions']} positions"
    )
    target = dict.fromkeys(softmax, VISION_TARGET) if targets and fits(s, VISION_SIZE) else {}
    yield table(report, title, "images per second", lambda seconds: f"{s['batch'] / seconds:.1f}", target)


VISION = Benchmark("vision", Vision, measure_vision, Report, vision_tables)
vision = VISION.main


# Forecasters

RIVAL = "SMAttn"


@dataclass(frozen=True)
class Forecast(BenchOptions):
    """Forecasters: the time of a training step, as ratio to the same model with plain attention.

    Every ratio compares two samples of the same round, and the table gives the median over the rounds with the
    quartiles. The results are forecast.json and forecast.md.
    """

    batch: Count = 32
    """Windows of a step."""
    rounds: Count = 15
    """Rounds measured; a round is one step of every model."""
    channels: Count = 7
    """Channels of the series."""
    lookback: Count = 1024
    """Rows to forecast from."""
    horizon: Count = 96
    """Rows to forecast."""
    windows: Count = 7521
    """Windows of an epoch, whose time is worked out from that of a step; ETTh1 has so many at 1024 and 96."""
    models: tuple[str, ...] = ("FEM-SM",)
    """Models by their names in the paper's tables, besides SMAttn, plain attention."""

    def validate(self) -> None:
        super().validate()
        check_different(self, "models", [name for name in NAMED if name != RIVAL])


def measure_forecast(options: Forecast) -> dict[str, Sequence[StepCost]]:
    channels, lengths = options.channels, {"lookback": options.lookback, "horizon": options.horizon}
    sizes: dict[str, Any] = {"channels": channels, **lengths}
    history, future = (torch.randn(options.batch, rows, channels, **options.tensors) for rows in lengths.values())
    field = {}
    for model in (RIVAL, *options.models):
        forecaster: Any = build(ForecastConfig(kind="fem", **sizes, **NAMED[model]))
        batch = {"history": history, "future": future}
        field[model] = Training.start(forecaster.to(**options.tensors), batch, loss=lambda found: sum(found.values()))
    return race(field, str, options)


# The most that FEM-SM may take of plain attention's time, and the size that is meant for.
FORECAST_TARGET = 1.2
FORECAST_SIZE = {"channels": 7, "lookback": 1024, "horizon": 96, "batch": 32, "dtype": "float32", "device": "cpu"}


def forecast_tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    steps = -(-s["windows"] // s["batch"])
    title = f"Training: look-back {s['lookback']}, horizon {s['horizon']}, {s['channels']} channels, batch {s['batch']}"
    target = {"FEM-SM": FORECAST_TARGET} if targets and fits(s, FORECAST_SIZE) else {}
    speed = f"seconds per {s['windows']:,} windows"
    yield table(report, title, speed, lambda seconds: f"{seconds * steps:.1f}", target)


FORECAST = Benchmark("forecast", Forecast, measure_forecast, Report, forecast_tables)
forecast = FORECAST.main
