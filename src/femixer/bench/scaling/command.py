"""Measure what is not measured yet, show the tables, and write scaling.json, scaling.md and scaling.png."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from femixer.bench.environment import environment
from femixer.bench.measure import cpu_threads
from femixer.bench.scaling.figure import draw
from femixer.bench.scaling.options import Options
from femixer.bench.scaling.points import measure_decode, measure_sequences, state_grows
from femixer.bench.scaling.report import Report, missing
from femixer.bench.scaling.tables import setting, tables
from femixer.options import parse
from femixer.training import atomic


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench scaling")
    try:
        report = run(options)
    except KeyboardInterrupt:
        print(
            f"interrupted; {options.out}/scaling.json keeps what is finished, and the same command without --overwrite "
            "goes on from there",
            file=sys.stderr,
        )
        return 130
    print(setting(report))
    for table in tables(report, options.targets):
        table.show()
    print(f"Results are in {options.out}/")
    return 0


def run(options: Options) -> Report:
    options.validate()
    for mixer in options.mixers:
        mixer.build(options)  # an option that does not fit shows now, not after the mixers before it
    options.out.mkdir(parents=True, exist_ok=True)
    with cpu_threads(options.threads) as threads:
        surroundings = environment(threads, options.device)
        report = Report.open(options.out, options.settings, surroundings, options.overwrite)
        measure(report, options)
    text = "\n\n".join([setting(report), *(table.markdown() for table in tables(report, options.targets))])
    atomic.write(options.out / "scaling.md", text + "\n")
    with atomic.replacing(options.out / "scaling.png") as partial:
        draw(report).savefig(partial, format="png")
    return report


def measure(report: Report, options: Options) -> None:
    """Add the points that the report lacks; scaling.json is written whenever some are finished."""
    for mixer in options.mixers:
        grows = state_grows(mixer, options)
        lengths, positions = options.lengths, options.positions
        if grows:
            lengths = tuple(n for n in lengths if n <= options.quadratic_limit)
            positions = tuple(min(n, options.quadratic_limit) for n in positions)
        for step in options.passes:
            todo = missing(lengths, report.sequence(mixer.prior, step))
            if todo:
                report.sequences += measure_sequences(mixer, step, todo, grows, options)
                report.save(options.out)
        todo = missing(positions, report.decoding(mixer.prior))
        if todo:
            report.decode += measure_decode(mixer, todo, grows, options)
            report.save(options.out)
