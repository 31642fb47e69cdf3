"""Measure, show the table, and write vision.json and vision.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from huggingface_hub.errors import StrictDataclassError

from femixer.bench.environment import environment
from femixer.bench.measure import cpu_threads, unlimited_compilation
from femixer.bench.mixers import ATTENTION
from femixer.bench.steps import Report, StepCost, race_of_steps
from femixer.bench.training import Training
from femixer.bench.vision.models import build, config, contestants, images, name
from femixer.bench.vision.options import Options
from femixer.bench.vision.tables import table
from femixer.models.parameters import parameter_count
from femixer.options import parse
from femixer.training import atomic


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
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads:
        torch.manual_seed(options.seed)
        training = measure(options)
        surroundings = environment(threads, options.device)
    settings = {**asdict(options), "image_size": config(ATTENTION, options).image_size}
    del settings["out"], settings["targets"]
    report = Report(settings, surroundings, training)
    atomic.write(options.out / "vision.json", json.dumps({"benchmark": "vision", **asdict(report)}, indent=2) + "\n")
    atomic.write(options.out / "vision.md", table(report, options.targets).markdown() + "\n")
    return report


def measure(options: Options) -> list[StepCost]:
    batch = images(options)
    field = {prior: Training.start(build(prior, options), batch, options.compile) for prior in contestants(options)}
    names = {prior: name(prior, options.parts) for prior in field}
    with unlimited_compilation(options.compile):
        return race_of_steps(field, names, ATTENTION, options.rounds, options.warmup)
