"""Measure, show the tables, and write lm.json and lm.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
import transformers

from femixer.bench.environment import environment
from femixer.bench.lm.decode import measure_decode
from femixer.bench.lm.models import decoding
from femixer.bench.lm.options import Options
from femixer.bench.lm.report import Report
from femixer.bench.lm.tables import tables
from femixer.bench.lm.training import measure_training
from femixer.bench.measure import cpu_threads
from femixer.options import parse
from femixer.training import atomic


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench lm")
    report = run(options)
    for table in tables(report, options.targets):
        table.show()
    print(f"Results are in {options.out}/")
    return 0


def run(options: Options) -> Report:
    options.validate()
    with torch.device("meta"):
        for contestant in decoding(options):
            contestant.model(options)  # an option that does not fit shows now, not after the models before it
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads:
        torch.manual_seed(options.seed)
        training = measure_training(options) if "training" in options.measure else []
        decode = measure_decode(options) if "decode" in options.measure else []
        surroundings = {**environment(threads, options.device), "transformers": transformers.__version__}
    settings = asdict(options)
    del settings["out"], settings["targets"]
    report = Report(settings, surroundings, training, decode)
    atomic.write(options.out / "lm.json", json.dumps({"benchmark": "lm", **asdict(report)}, indent=2) + "\n")
    text = "\n\n".join(table.markdown() for table in tables(report, options.targets))
    atomic.write(options.out / "lm.md", text + "\n")
    return report
