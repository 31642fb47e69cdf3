"""The tables of `femixer bench lm`: training, decoding at each context, and growth with the context."""

from __future__ import annotations

from collections.abc import Iterator

from femixer.bench.lm.models import LLAMA
from femixer.bench.lm.report import DecodeCost, Report, TrainingCost, growth
from femixer.bench.lm.targets import DecodeTarget, decode_target, growth_target, training_target
from femixer.bench.measure import Spread
from femixer.bench.mixers import ATTENTION
from femixer.bench.table import Table, ratio_cell


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    if report.training:
        rows = [_training_row(cost, training_target(cost, s) if targets else None) for cost in report.training]
        mode = "compiled" if s["compile"] else "eager"
        title = f"Training, {mode}: {s['length']} tokens, batch {s['batch']}, {_setting(report)}"
        header = ["model", "parameters", "tokens per second", "ratio to the plain transformer (larger is better)"]
        yield Table(title, header, rows)
    for context in dict.fromkeys(cost.context for cost in report.decode):
        costs = [cost for cost in report.decode if cost.context == context]
        rows = [_decode_row(cost, decode_target(cost, s) if targets else DecodeTarget()) for cost in costs]
        title = f"Greedy decoding with cache: context {context}, batch {s['decode_batch']}, {_setting(report)}"
        header = ["model", "cache", "ms per token", "tokens per second", "ratio to Llama (larger is better)"]
        header += ["cache bytes", "ratio to Llama", "bytes per token of context"]
        yield Table(title, header, rows)
    if len({cost.context for cost in report.decode}) > 1:
        header = ["model", "cache", "context", "growth"]
        yield Table("Growth of the time per token with the context (1: flat)", header, [*_growth_rows(report, targets)])


def _setting(report: Report) -> str:
    s, e = report.settings, report.environment
    grouped = "" if s["kv_heads"] is None else f" ({s['kv_heads']} for keys and values)"
    return (
        f"{s['layers']} layers, dim {s['dim']}, {s['heads']} heads{grouped}, vocabulary {s['vocabulary']}, "
        f"{s['dtype']}, {e['threads']} threads, torch {e['torch']}, transformers {e['transformers']}"
    )


def _training_row(cost: TrainingCost, target: float | None) -> list[str]:
    ratio = "1" if cost.prior == ATTENTION else speed_cell(cost.speed.ratio, target)
    return [cost.name, f"{cost.parameters:,}", f"{cost.speed.tokens_per_second.median:.0f}", ratio]


def _decode_row(cost: DecodeCost, target: DecodeTarget) -> list[str]:
    rival = cost.prior == LLAMA
    return [
        cost.name,
        cost.cache or "",
        f"{Spread.of(cost.speed.samples).median * 1e3:.2f}",
        f"{cost.speed.tokens_per_second.median:.1f}",
        "1" if rival else speed_cell(cost.speed.ratio, target.speed),
        f"{cost.cache_bytes:,.0f}",
        "1" if rival else ratio_cell(cost.cache_ratio, target.cache),
        "constant" if cost.bytes_per_token is None else f"{cost.bytes_per_token:,.0f}",
    ]


def _growth_rows(report: Report, targets: bool) -> Iterator[list[str]]:
    """From the shortest to the longest context."""
    for name, cache in dict.fromkeys((cost.name, cost.cache) for cost in report.decode):
        costs = [cost for cost in report.decode if (cost.name, cost.cache) == (name, cache)]
        first, last = (choose(costs, key=lambda cost: cost.context) for choose in (min, max))
        target = growth_target(last, report.settings) if targets else None
        yield [name, cache or "", f"{first.context} to {last.context}", ratio_cell(growth(last, first), target)]


def speed_cell(ratio: Spread, target: float | None = None) -> str:
    """A ratio of speeds with its quartiles, and beside a target whether it is reached."""
    text = ratio_cell(ratio)
    return text if target is None else f"{text} {'≥' if ratio.median >= target else '<'} {target:.2f}"
