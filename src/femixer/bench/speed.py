"""`femixer bench speed`: the paper's two tables of speed, ours beside its figures, as ratios to plain attention."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from femixer.bench.calls import Call, flops, peak_memory
from femixer.bench.measure import MeasureOptions, Timing, command, ratio_cell, resumed, timed
from femixer.bench.measure import Report as BenchReport
from femixer.models import FEMConfig, FEMModel
from femixer.models.config import plain_refusals
from femixer.models.named import NAMED, Fields, baseline, fem, parameters_of
from femixer.optional import require
from femixer.options import Count, check, given, parse
from femixer.reporting import Column, Row, Table, figures, write

tyro = require("tyro", "cli")

RIVAL = "SMAttn"
"""Softmax attention by torch's fused kernel: the paper's SM (Flash), and FEM-SM (-G,T,L,C) of its table of latency."""
NAIVE = "SMAttn-naive"
"""The same with all weights of all pairs written out."""
OWN: dict[str, Fields] = {
    NAIVE: baseline("attention"),
    "PaTH": baseline("path"),
    "GLA+L,T,G": fem("gla", "LTG"),
    "Mamba+L,T,G": fem("mamba", "LTG"),
}
"""Rows that `femixer.models.named` need not have."""
ROWS = {**NAMED, **OWN}


# The paper's figures


class Published(NamedTuple):
    """Seconds of a forward pass and of a training step, and where the table has them gigabytes at the peak and
    millions of FLOPs per token of the two."""

    forward: float
    training: float
    forward_peak: float | None = None
    training_peak: float | None = None
    forward_flops: float | None = None
    training_flops: float | None = None

    def ratio(self, rival: Published, name: str) -> str:
        own, other = getattr(self, name), getattr(rival, name)
        return "" if own is None or other is None else f"{own / other:.3f}"


LATENCY = {
    "GatedDeltaNet": Published(0.016, 0.042),
    "DeltaNet": Published(0.014, 0.036),
    "HGRN2": Published(0.009, 0.024),
    "RWKV6": Published(0.014, 0.037),
    "RWKV7": Published(0.017, 0.050),
    "DiffTrans": Published(0.018, 0.041),
    "SMAttn": Published(0.012, 0.027),
    "SMAttn+C": Published(0.015, 0.033),
    "SMAttn+C,L": Published(0.016, 0.035),
    "SMAttn+C,L,T": Published(0.017, 0.040),
    "FEM-SM": Published(0.017, 0.041),
}
"""Table tab:speed-latency-throughput-k, where rows are FEM-SM without some parts."""
GPT2 = {
    "RWKV7": Published(0.0832, 0.2367, 11.08, 11.48, 179.35, 538.09),
    "LinAttn": Published(0.0652, 0.1368, 6.01, 6.16, 169.94, 509.75),
    "HGRN2": Published(0.0680, 0.1481, 6.66, 6.94, 169.89, 509.65),
    "PaTH": Published(0.0693, 0.2098, 5.62, 5.82, 171.29, 513.84),
    "GSA": Published(0.0765, 0.1901, 7.72, 8.08, 184.04, 552.11),
    "SMAttn-naive": Published(0.1306, 0.3334, 9.61, 10.34, 207.84, 623.41),
    "SMAttn": Published(0.0649, 0.1471, 4.89, 4.99, 169.89, 509.65),
    "SMAttn+L,T,G": Published(0.0693, 0.1615, 5.82, 5.92, 169.92, 509.75),
    "FEM-SM": Published(0.0732, 0.1853, 7.67, 7.77, 171.43, 514.19),
    "GLA": Published(0.0824, 0.2213, 9.95, 10.17, 208.03, 623.90),
    "GLA+L,T,G": Published(0.0875, 0.2344, 10.89, 11.08, 208.07, 624.02),
    "FEM-GLA": Published(0.0934, 0.2566, 12.74, 12.93, 209.57, 628.46),
    "Mamba": Published(0.0606, 0.1249, 4.60, 4.70, 156.33, 468.97),
    "Mamba+L,T,G": Published(0.0586, 0.1438, 6.77, 6.87, 149.29, 447.83),
    "FEM-Mamba": Published(0.0647, 0.1831, 7.97, 8.07, 150.44, 451.25),
}
"""Table tab:gpt2_latency, in FP32; SMAttn is its SM (Flash)."""
PAPER = {"latency": LATENCY, "gpt2": GPT2}
"""Both on an Nvidia L40S."""


# Options; the defaults depend on --table and --quick


@dataclass(frozen=True)
class Options(MeasureOptions):
    """The paper's two tables of speed: latency, throughput, peak memory and FLOPs of models, as ratios to attention.

    Every ratio of times compares two calls of the same round, and the table gives the median over the rounds with the
    quartiles; the paper's ratios stand beside ours. The results are speed-TABLE.json, .md, .tex, .csv and .png. Rows
    that the JSON file already holds are not measured again, so that an interrupted run goes on with the same command.
    """

    table: Literal["latency", "gpt2"] = "latency"
    """latency: 8 layers, 4 heads, dim 512, 2048 tokens, batch 4;
    gpt2: 12 layers, 12 heads, dim 768, 1024 tokens, batch 8."""
    quick: bool = False
    """Fewer layers, tokens and rounds: about five minutes on two CPU cores that do nothing else."""
    rows: tuple[str, ...] = ()
    """Rows by name, of the table or of femixer.models.named; by default all of the table."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"], tyro.conf.arg(aliases=("--precision",))] = (
        "float32"
    )
    layers: Count = 8
    """Layers of the models."""
    dim: Count = 512
    """Width of the tokens."""
    heads: Count = 4
    """Heads; divides dim. Rivals that are published with few heads keep theirs."""
    tokens: Count = 2048
    """Tokens of a sequence."""
    batch: Count = 4
    overwrite: bool = False
    """Measure everything anew; what the JSON file holds is replaced when all is measured."""

    @property
    def paper(self) -> Mapping[str, Published]:
        return PAPER[self.table]

    @property
    def asked(self) -> tuple[str, ...]:
        """The rows, attention first: nothing has a ratio without it."""
        return tuple(dict.fromkeys((RIVAL, *(self.rows or self.paper))))

    @property
    def path(self) -> Path:
        return self.out / f"speed-{self.table}.json"

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers of a row, as opposed to which rows are measured."""
        return {name: value for name, value in super().settings.items() if name not in ("rows", "overwrite")}

    def validate(self) -> None:
        super().validate()
        even = 2 * self.heads  # rotary positions turn pairs of channels
        check(self.dim % even == 0, "dim", self.dim, f"a multiple of {even}: an even number for each of the heads")
        for row in self.rows:
            check(row in ROWS, "rows", row, f"some of {', '.join(ROWS)}")


SETTINGS: dict[tuple[str, bool], dict[str, int]] = {
    ("latency", False): {"layers": 8, "dim": 512, "heads": 4, "tokens": 2048, "batch": 4},
    ("latency", True): {"layers": 2, "dim": 512, "heads": 4, "tokens": 1024, "batch": 1, "rounds": 5, "warmup": 1},
    ("gpt2", False): {"layers": 12, "dim": 768, "heads": 12, "tokens": 1024, "batch": 8},
    ("gpt2", True): {"layers": 2, "dim": 768, "heads": 12, "tokens": 512, "batch": 1, "rounds": 5, "warmup": 1},
}


def read(args: Sequence[str]) -> Options:
    """The options, with the defaults of the table that is asked for."""
    first = parse(Options, args, "bench speed")
    sizes: dict[str, Any] = SETTINGS[first.table, first.quick]
    return parse(Options, args, "bench speed", Options(**sizes))


# The models: a stack of blocks without a vocabulary, whose products the paper does not count either


def call_of(row: str, options: Options, layers: int | None = None, device: str | None = None) -> Call:
    """The call of a row's model; a ValueError that says why where there is no such model."""
    sizes: dict[str, Any] = {
        "vocab_size": 1,
        "hidden_size": options.dim,
        "num_hidden_layers": layers or options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": options.tokens,
    }
    made = {**options.tensors, **given(device=device)}
    torch.manual_seed(options.seed)
    with plain_refusals():
        config = FEMConfig(**sizes, **ROWS[row])
        with torch.device(made["device"]):
            model = FEMModel(config).to(made["dtype"])
    shape = (options.batch, options.tokens, options.dim)
    x, gradient = (torch.randn(shape, **made) for _ in range(2))

    def stack(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if row == NAIVE else nullcontext():
            return model(inputs_embeds=x, use_cache=False).last_hidden_state

    return Call(stack, model, x.requires_grad_(), gradient)


# The measurement: a row and attention in the same rounds


@dataclass(frozen=True)
class Cost:
    """What a row's model costs; training is forward and backward. Peaks are bytes with the weights."""

    row: str
    parameters: int
    forward: Timing
    training: Timing
    forward_peak: int
    training_peak: int
    forward_flops: int
    training_flops: int
    load: float
    """Processes that ran on the machine when the measurement began, on average over the minute before."""


@dataclass(frozen=True)
class Report(BenchReport):
    """All rows measured with the same settings in the same environment."""

    rows: list[Cost]

    @property
    def costs(self) -> dict[str, Cost]:
        """In the order of the paper's table, others behind."""
        found = {cost.row: cost for cost in self.rows}
        order = [*PAPER[self.settings["table"]], *found]
        return {row: found[row] for row in dict.fromkeys(order) if row in found}


def counted(row: str, options: Options) -> dict[str, int]:
    """FLOPs from the shapes alone. All layers are alike: the second costs what each further one does."""
    counts = []
    for layers in (1, 2):
        call = call_of(row, options, layers, "meta")
        counts.append([flops(step, elementwise=True) for step in (call.forward, call.train_and_clear)])
    whole = (one + (options.layers - 1) * (two - one) for one, two in zip(*counts, strict=True))
    return dict(zip(("forward_flops", "training_flops"), whole, strict=True))


def measure(row: str, options: Options) -> Cost:
    load = os.getloadavg()[0]
    field = {name: call_of(name, options) for name in dict.fromkeys((row, RIVAL))}
    call = field[row]
    device, parameters = call.x.device, parameters_of(call.layer)
    weights = parameters * call.x.element_size()
    for each in field.values():  # the first calls compile
        each.forward()
        each.train_and_clear()
    forward_peak, training_peak = (weights + peak_memory(step, device) for step in (call.forward, call.train_and_clear))
    forward = timed(f"{row} forward", {name: each.time_forward for name, each in field.items()}, options)
    training = timed(f"{row} training", {name: each.time_training for name, each in field.items()}, options)
    return Cost(
        row=row,
        parameters=parameters,
        forward=Timing.of(forward[row], forward[RIVAL]),
        training=Timing.of(training[row], training[RIVAL]),
        forward_peak=forward_peak,
        training_peak=training_peak,
        **counted(row, options),
        load=load,
    )


def run(options: Options) -> Report:
    """Measure what is not measured yet, and write the files; rows of the table that cannot be built are told."""
    options.validate()
    require("matplotlib.figure", "plot")  # that it is missing shows now, not after the measurement
    options.out.mkdir(parents=True, exist_ok=True)
    possible = []
    for row in options.asked:
        try:
            call_of(row, options, layers=1, device="meta")
            possible.append(row)
        except ValueError as reason:
            if options.rows:
                raise
            print(f"{row} is left out: {reason}", file=sys.stderr)
    with resumed(Report, options.path, options, options.overwrite) as (report, save):
        for row in (row for row in possible if row not in report.costs):
            report.rows.append(measure(row, options))
            save()
    write(options.out, [*tables(report)], options.path.stem)
    figures.save(draw(report), options.path.with_suffix(".png"))
    return report


# The tables: time, memory, FLOPs


def size_of(report: Report) -> str:
    words = "{layers} layers, dim {dim}, {heads} heads, {tokens} tokens, batch {batch}"
    return words.format(**report.settings)


def tables(report: Report) -> Iterator[Table]:
    costs, title = report.costs, f"Time: {size_of(report)}, {report.place()}"
    yield Table.of(_columns("ms", "tokens/s"), [_time_row(cost, report) for cost in costs.values()], title)
    rows = [_size_row(cost, report, "peak", 1e6) for cost in costs.values()]
    yield Table.of(_columns("peak MB"), rows, "Peak memory with the weights")
    rows = [_size_row(cost, report, "flops", 1e9) for cost in costs.values()]
    note = (
        "Ratios are to SMAttn, attention by torch's fused kernel, of the same rounds: median and quartiles; training "
        "is forward + backward. The paper's are on an L40S at its full size. It does not count what its fused kernels "
        "compute; here matrix products count wherever they happen, and elementwise operations one per number."
    )
    loads = [cost.load for cost in costs.values()]
    busy = f"Load of the machine before the rows were measured: {min(loads):.1f} to {max(loads):.1f}."
    missing = [row for row in PAPER[report.settings["table"]] if row not in costs]
    notes = [note, busy, *([f"Not measured: {', '.join(missing)}."] if missing else [])]
    yield Table.of(_columns("GFLOPs", "MFLOPs per token"), rows, "FLOPs", *notes)


PASSES = ("forward", "training")


def _columns(unit: str, *more: str) -> list[Column | str]:
    columns: list[Column | str] = ["row"]
    columns += ["parameters"] if unit == "ms" else []
    for step in PASSES:
        columns += [f"{step} {unit}", Column("ratio", f"{step}_ratio", "right")]
        columns += [Column("paper's", f"{step}_paper", "right"), *(f"{step} {each}" for each in more)]
    return columns


def _paper(row: str, report: Report, name: str) -> str:
    published = PAPER[report.settings["table"]]
    return published[row].ratio(published[RIVAL], name) if row in published else ""


def _time_row(cost: Cost, report: Report) -> Row:
    tokens = report.settings["batch"] * report.settings["tokens"]
    cells = [cost.row, f"{cost.parameters:,}"]
    for step in PASSES:
        timing: Timing = getattr(cost, step)
        ratio = "1" if cost.row == RIVAL else ratio_cell(timing.ratio)
        cells += [f"{timing.seconds.median * 1e3:.1f}", ratio, _paper(cost.row, report, step)]
        cells.append(f"{tokens / timing.seconds.median:,.0f}")
    return cells


def _size_row(cost: Cost, report: Report, what: str, unit: float) -> Row:
    """Of peaks or FLOPs, which are exact."""
    tokens, rival = report.settings["batch"] * report.settings["tokens"], report.costs[RIVAL]
    cells = [cost.row]
    for step in PASSES:
        name = f"{step}_{what}"
        value = getattr(cost, name)
        ratio = "1" if cost.row == RIVAL else ratio_cell(value / getattr(rival, name))
        cells += [f"{value / unit:.4g}", ratio, _paper(cost.row, report, name)]
        cells += [f"{value / tokens / 1e6:.4g}"] if what == "flops" else []
    return cells


# The figure: our ratios of times and the paper's, one line per row


def draw(report: Report) -> Any:
    rows = [row for row in report.costs if row != RIVAL][::-1]
    drawing = figures.figure(11.0, 1.4 + 0.3 * max(2, len(rows)))
    for axes, step in zip(drawing.subplots(1, 2, sharey=True), PASSES, strict=True):
        for place, row in enumerate(rows):
            ratio = getattr(report.costs[row], step).ratio
            axes.plot([ratio.q1, ratio.q3], [place, place], color=figures.BLUE, linewidth=2.5, alpha=0.5)
            axes.plot(ratio.median, place, "o", color=figures.BLUE, label="here, median and quartiles")
            if paper := _paper(row, report, step):
                look = {"color": figures.VERMILION, "fillstyle": "none", "label": "the paper, L40S"}
                axes.plot(float(paper), place, "D", **look)
        axes.axvline(1, color="black", linestyle=":", linewidth=1)
        axes.set(yticks=range(len(rows)), yticklabels=rows, xscale="log", xlabel="time, ratio to attention")
        axes.set_title("Forward" if step == "forward" else "Training (forward + backward)", loc="left")
        figures.plain_log(axes.xaxis, (1, 1.5, 2, 3, 5))
        figures.quiet(axes)
    found = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    if found:
        drawing.legend(found.values(), found.keys(), loc="outside lower center", ncols=2, frameon=False)
    drawing.suptitle(f"{size_of(report)}, {report.settings['dtype']}, {report.settings['device']}")
    return drawing


def main(args: Sequence[str]) -> int:
    return command(read(args), run, tables)
