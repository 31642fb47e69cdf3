"""Measure, show the tables, and write layer.json and layer.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch

from femixer.bench.busy import busy
from femixer.bench.environment import environment
from femixer.bench.layer.decode import measure_decode
from femixer.bench.layer.options import Options
from femixer.bench.layer.report import Report
from femixer.bench.layer.sequence import measure_sequences
from femixer.bench.layer.tables import tables
from femixer.bench.measure import cpu_threads
from femixer.options import parse
from femixer.training import atomic


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench layer")
    report = run(options)
    for table in tables(report, options.targets):
        table.show()
    print(f"Results are in {options.out}/")
    return 0


def run(options: Options) -> Report:
    options.validate()
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads, busy(options.busy):
        torch.manual_seed(options.seed)
        layers = measure_sequences(options)
        decode = [] if options.encoder else measure_decode(options)
    settings = asdict(options)
    del settings["out"], settings["targets"]
    report = Report(settings, environment(threads, options.device), layers, decode)
    atomic.write(options.out / "layer.json", json.dumps({"benchmark": "layer", **asdict(report)}, indent=2) + "\n")
    text = "\n\n".join(table.markdown() for table in tables(report, options.targets))
    atomic.write(options.out / "layer.md", text + "\n")
    return report
