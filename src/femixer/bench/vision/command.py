"""Measure, show the table, and write vision.json and vision.md."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError

from femixer.bench.measure import unlimited_compilation
from femixer.bench.mixers import ATTENTION
from femixer.bench.steps import Report, StepCost, measured, race_of_steps
from femixer.bench.training import Training
from femixer.bench.vision.models import build, config, contestants, images, name
from femixer.bench.vision.options import Options
from femixer.bench.vision.tables import table
from femixer.models.parameters import parameter_count
from femixer.options import parse


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench vision")
    table(run(options), options.targets).show()
    print(f"Results are in {options.out}/")
    return 0


def run(options: Options) -> Report:
    options.validate()
    try:
        for prior in contestants(options):  # an option that does not fit shows now, not after the models before it
            parameter_count(config(prior, options))
    except StrictDataclassError as error:  # how transformers wraps what the configuration says
        raise ValueError(str(error.__cause__ or error)) from error
    size = config(ATTENTION, options).image_size
    return measured("vision", options, lambda: measure(options), table, image_size=size)


def measure(options: Options) -> list[StepCost]:
    batch = images(options)
    field = {prior: Training.start(build(prior, options), batch, options.compile) for prior in contestants(options)}
    names = {prior: name(prior, options.parts) for prior in field}
    with unlimited_compilation(options.compile):
        return race_of_steps(field, names, ATTENTION, options.rounds, options.warmup)
