"""The tables of `femixer bench scaling`: the points, and how much they grow from a short length to the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from femixer.bench.mixers import label
from femixer.bench.scaling.report import DecodePoint, Report, SequencePoint, growth
from femixer.bench.table import Table, ratio_cell

# The project's target: time per token at 65536 tokens is at most this much more than at 4096, for one sequence.
FROM, TO, TARGET = 4096, 65536, 1.30
PASSES = {"forward": "forward", "training": "forward + backward"}
Point = TypeVar("Point", bound=SequencePoint | DecodePoint)


def setting(report: Report) -> str:
    """The line above the tables."""
    s, e = report.settings, report.environment
    grouped = "" if s["kv_heads"] is None else f" ({s['kv_heads']} for keys and values)"
    return (
        f"One layer, eager: batch {s['batch']}, dim {s['dim']}, {s['heads']} heads{grouped}, "
        f"parts {s['parts'] or '(mean)'}, {s['dtype']}, causal, {e['threads']} threads, torch {e['torch']}"
    )


def tables(report: Report, targets: bool) -> Iterator[Table]:
    target = TARGET if targets and report.settings["batch"] == 1 else None
    for step, name in PASSES.items():
        points = {mixer: line for mixer in report.mixers if (line := report.sequence(mixer, step))}
        if not points:
            continue
        yield _grid(f"Time per token in µs, {name}", "tokens", points, lambda p: f"{p.seconds.median * 1e6:.2f}")
        yield _grid(f"Peak memory in MB, {name}", "tokens", points, lambda p: f"{p.peak_bytes / 1e6:.4g}")
        rows = [_growth_row(mixer, line, target) for mixer, line in points.items()]
        header = ("mixer", "tokens", "time per token", "peak memory per token")
        yield Table(f"Growth with the length, {name} (1: linear)", header, rows)
    decode = {mixer: steps for mixer in report.mixers if (steps := report.decoding(mixer))}
    speed = tokens_per_second(report)
    yield _grid("Tokens per second, decoding", "tokens before", decode, lambda p: f"{speed(p):.0f}")
    rows = [_decode_growth_row(mixer, steps) for mixer, steps in decode.items()]
    yield Table("Growth with the position, decoding", ("mixer", "tokens before", "time per token"), rows)


def tokens_per_second(report: Report) -> Callable[[DecodePoint], float]:
    """Of all sequences of the batch together."""
    return lambda point: report.settings["batch"] / point.seconds.median


def _grid(title: str, axis: str, points: Mapping[str, Mapping[int, Point]], cell: Callable[[Point], str]) -> Table:
    columns = sorted({n for line in points.values() for n in line})
    rows = [[label(mixer), *(cell(line[n]) if n in line else "" for n in columns)] for mixer, line in points.items()]
    return Table(title, [f"{axis}:", *map(str, columns)], rows)


def _growth_row(mixer: str, points: Mapping[int, SequencePoint], target: float | None) -> list[str]:
    """From 4096 tokens, or from the shortest where that was not measured or is the longest, to the longest."""
    last = points[max(points)]
    first = points[FROM if FROM in points and last.length > FROM else min(points)]
    judged = target if (first.length, last.length) == (FROM, TO) and not last.state_grows else None
    memory = (last.peak_bytes / last.length) / (first.peak_bytes / first.length)
    span = f"{first.length} to {last.length}"
    return [label(mixer), span, ratio_cell(growth(last, first), judged), ratio_cell(memory)]


def _decode_growth_row(mixer: str, points: Mapping[int, DecodePoint]) -> list[str]:
    first, last = points[min(points)], points[max(points)]
    return [label(mixer), f"{first.position} to {last.position}", ratio_cell(growth(last, first))]
