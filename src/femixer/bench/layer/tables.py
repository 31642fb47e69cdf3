"""The tables of `femixer bench layer`: one per length and mode, and one for decoding."""

from __future__ import annotations

from collections.abc import Iterator

from femixer.bench.layer.report import DecodeCost, Report, SequenceCost
from femixer.bench.layer.targets import Target, decode_target, sequence_target
from femixer.bench.measure import Spread
from femixer.bench.mixers import ATTENTION
from femixer.bench.table import Table, ratio_cell
from femixer.priors.parsing import parse_prior

FLOPS_NOTE = (
    "GFLOPs: matrix products only; the recurrences of linear-time priors run in compiled kernels that are not counted."
)


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s, e = report.settings, report.environment
    grouped = "" if s["kv_heads"] is None else f" ({s['kv_heads']} for keys and values)"
    setting = (
        f"dim {s['dim']}, {s['heads']} heads{grouped}, {s['dtype']}, "
        f"{'encoder' if s['encoder'] else 'causal'}, {e['threads']} threads, torch {e['torch']}"
    )
    if s["busy"]:
        setting += f", beside {s['busy']} busy {'process' if s['busy'] == 1 else 'processes'}"
    note = "" if all(parse_prior(prior)[0] == "softmax" for prior in s["priors"]) else FLOPS_NOTE
    for length in (*s["lengths"], *s["forward_lengths"]):
        trained = length in s["lengths"]
        for mode in s["modes"]:
            costs = [cost for cost in report.layers if (cost.length, cost.mode) == (length, mode)]
            rows = [_sequence_row(cost, sequence_target(cost, s) if targets else Target()) for cost in costs]
            title = f"One layer, {mode}: {length} tokens, batch {s['batch']}, {setting}"
            header = ["layer", "parameters", "GFLOPs", "forward ms", "ratio"]
            header += ["forward + backward ms", "ratio"] if trained else []
            header += ["peak MB" if trained else "forward peak MB", "ratio"]
            yield Table(title, header, rows, note)
    if report.decode:
        rows = [_decode_row(cost, decode_target(cost, s) if targets else None) for cost in report.decode]
        title = f"Decoding one token, eager: context {s['context']}, batch {s['decode_batch']}, {setting}"
        header = ["layer", "cache", "ms per token", "ratio", "state bytes", "ratio", "bytes per token of context"]
        yield Table(title, header, rows)


def _sequence_row(cost: SequenceCost, target: Target) -> list[str]:
    share = f" ({cost.parameters.conditioner_share:.1%} conditioner)" if cost.parameters.conditioner else ""
    row = [cost.name, f"{cost.parameters.total:,}{share}", f"{cost.forward_flops / 1e9:.4g}"]
    row += [f"{cost.forward.seconds.median * 1e3:.2f}", _ratio(cost, cost.forward.ratio, target.forward)]
    if cost.training is not None:
        row += [f"{cost.training.seconds.median * 1e3:.2f}", _ratio(cost, cost.training.ratio, target.training)]
    return [*row, f"{cost.peak_bytes / 1e6:.4g}", _ratio(cost, cost.peak_ratio, target.memory)]


def _decode_row(cost: DecodeCost, target: float | None) -> list[str]:
    return [
        cost.name,
        cost.cache or "",
        f"{cost.step.seconds.median * 1e3:.3f}",
        _ratio(cost, cost.step.ratio, target),
        f"{cost.state_bytes:,.0f}",
        _ratio(cost, cost.state_ratio),
        "constant" if cost.bytes_per_token is None else f"{cost.bytes_per_token:,.0f}",
    ]


def _ratio(cost: SequenceCost | DecodeCost, ratio: Spread | float, target: float | None = None) -> str:
    return "1" if cost.prior == ATTENTION else ratio_cell(ratio, target)
