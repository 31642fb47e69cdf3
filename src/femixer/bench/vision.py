"""`femixer bench vision`: vision models with FEM against the same model with plain attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from femixer.bench.contestants import ATTENTION, canonical, check_priors, full_label
from femixer.bench.measure import BenchOptions, unlimited_compilation
from femixer.bench.models import Report, StepCost, Training, race_of_steps
from femixer.bench.report import command, fits, measured, place_of, ratio_cell
from femixer.models import VISION_PRESETS, FEMForImageClassification, FEMVisionConfig, preset
from femixer.models.config import plain_refusals
from femixer.models.named import parameter_count
from femixer.models.vision import POSITIONS
from femixer.options import check, check_positive
from femixer.priors import parse_prior
from femixer.reporting import Table


@dataclass(frozen=True)
class Options(BenchOptions):
    """Vision models: the time of a training step, as ratio to the same model with plain attention.

    Every ratio compares two samples of the same round, and the table gives the median over the rounds with the
    quartiles. The results are vision.json and vision.md.
    """

    batch: int = 8
    """Images of a step."""
    rounds: int = 10
    """Rounds measured; a round is one step of every model."""
    warmup: int = 2
    """Rounds before that, not counted."""
    preset: str = "deit-tiny"
    """Size of the models: deit-tiny, deit-small or digits."""
    image_size: int | None = None
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
        check_positive(image_size=self.image_size)
        check_priors(self.priors)


def config(prior: str, options: Options) -> FEMVisionConfig:
    size: dict[str, Any] = {"positions": options.positions}
    if options.image_size is not None:
        size["image_size"] = options.image_size
    if prior == ATTENTION:
        return preset(options.preset, **size, mixer="attention")
    name, given = parse_prior(prior)
    return preset(options.preset, **size, prior=name, parts=options.parts, prior_options={name: given})


def build(prior: str, options: Options) -> FEMForImageClassification:
    model = FEMForImageClassification(config(prior, options))
    model.to(**options.tensors)
    return model


def images(options: Options) -> dict[str, Tensor]:
    """A batch of noise, with a class for each image."""
    size = config(ATTENTION, options)
    shape = (options.batch, size.num_channels, size.image_size, size.image_size)
    classes = size.num_labels
    assert classes is not None  # transformers fills it in
    labels = torch.randint(classes, (options.batch,), device=options.device)
    return {"pixel_values": torch.randn(shape, **options.tensors), "labels": labels}


def measure(options: Options) -> Mapping[str, Sequence[Any]]:
    batch = images(options)
    field = {prior: Training.start(build(prior, options), batch, options.compile) for prior in options.contestants}
    with unlimited_compilation(options.compile):
        return race_of_steps(field, lambda prior: _name(prior, options.parts), ATTENTION, options)


def _name(prior: str, parts: str) -> str:
    return "plain attention" if prior == ATTENTION else full_label(prior, parts)


# The most that FEM with the softmax prior may take of plain attention's time, and the size that is meant for.
TARGET = 1.15
SIZE = {
    "preset": "deit-tiny",
    "image_size": 224,
    "batch": 8,
    "parts": "CLTG",
    "positions": "learned",
    "dtype": "float32",
    "device": "cpu",
}


def target(cost: StepCost, report: Report) -> float | None:
    """None where there is none."""
    is_softmax = cost.key != ATTENTION and canonical(cost.key) == "softmax"
    return TARGET if is_softmax and fits(report.settings, SIZE) else None


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    mode = "compiled" if s["compile"] else "eager"
    title = (
        f"Training, {mode}: {s['preset']}, {s['image_size']} x {s['image_size']} pixels, batch {s['batch']}, "
        f"{s['positions']} positions, {place_of(report)}"
    )
    header = ["model", "parameters", "ms per step", "images per second", "ratio to plain attention (smaller is better)"]
    yield Table.of(header, [_row(cost, report, targets) for cost in report.training], title)


def _row(cost: StepCost, report: Report, targets: bool) -> list[str]:
    limit = target(cost, report) if targets else None
    return [
        cost.name,
        f"{cost.parameters:,}",
        f"{cost.seconds.median * 1e3:.0f}",
        f"{report.settings['batch'] / cost.seconds.median:.1f}",
        "1" if cost.key == ATTENTION else ratio_cell(cost.ratio, limit),
    ]


def run(options: Options) -> Report:
    options.validate()
    with plain_refusals():
        for prior in options.contestants:  # an option that does not fit shows now, not after the models before it
            parameter_count(config(prior, options))
    size = {"image_size": config(ATTENTION, options).image_size}
    return measured("vision", options, lambda: measure(options), Report, tables, settings=size)


def main(args: Sequence[str]) -> int:
    return command("vision", Options, args, run, tables)
