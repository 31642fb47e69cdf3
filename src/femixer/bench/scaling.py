"""`femixer bench scaling`: how time per token, memory and decoding change with the length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from femixer.bench.calls import Call, Decoder, peak_memory
from femixer.bench.contestants import ATTENTION, Mixer, check_priors, label
from femixer.bench.measure import (
    MixerOptions,
    Spread,
    command,
    paired_ratio,
    ratio_cell,
    resumed,
    timed,
    told,
)
from femixer.bench.measure import Report as BenchReport
from femixer.optional import require
from femixer.options import Count, Whole, check, check_different, parse
from femixer.priors import PRIORS
from femixer.reporting import Row, Table, figures, write

NAME = "scaling.json"
PASSES = {"forward": "forward", "training": "forward + backward"}


@dataclass(frozen=True)
class Options(MixerOptions):
    """Time per token and peak memory against the length of the sequence, and speed of decoding against the position.

    The results are scaling.json, scaling.md and scaling.png. What scaling.json already holds is not measured again, so
    an interrupted run goes on with the same command. Tables and figure show everything in scaling.json.
    """

    dim: Count = 512
    heads: Count = 8
    batch: Count = 1
    """Sequences side by side, also when decoding."""
    rounds: Count = 5
    """Rounds measured; a round is one sample of every length, or of every position."""
    warmup: Whole = 1
    priors: tuple[str, ...] = (ATTENTION, *PRIORS)
    """Attention and priors of FEM, each alone or with options (gla, gla:decay=channel, name:option=value,...)."""
    parts: str = "CLTG"
    """Parts of FEM: a subset of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    lengths: tuple[Count, ...] = tuple(2**n for n in range(9, 17))
    """Tokens of a sequence."""
    training: bool = False
    """Measure forward + backward too."""
    positions: tuple[Count, ...] = tuple(10**n for n in range(1, 7))
    """Tokens seen when decoding one more."""
    quadratic_limit: Count = 8192
    """The largest length and position for mixers that keep every token in their state (softmax, attention)."""
    overwrite: bool = False
    """Measure everything anew; what scaling.json holds is replaced when all is measured."""

    @property
    def mixers(self) -> list[Mixer]:
        return [Mixer() if prior == ATTENTION else Mixer(prior, self.parts) for prior in self.priors]

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", "training") if self.training else ("forward",)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the number at a point, as opposed to which points are measured."""
        which = ("priors", "lengths", "training", "positions", "quadratic_limit", "overwrite")
        return {name: value for name, value in super().settings.items() if name not in which}

    def validate(self) -> None:
        super().validate()
        check_different(self, "lengths")
        check_different(self, "positions")
        shortest = min(self.lengths)
        check(shortest <= self.quadratic_limit, "quadratic_limit", self.quadratic_limit, f"at least {shortest}")
        check_priors(self, ATTENTION)


# The points, and scaling.json, which keeps them from run to run


@dataclass(frozen=True)
class SequencePoint:
    """Whole sequences of one length. samples: seconds per token, one per round.

    mixer: attention, or the prior of FEM as on the command line.
    """

    mixer: str
    step: str  # forward or training (forward and backward)
    length: int
    state_grows: bool
    peak_bytes: int
    samples: list[float]

    @property
    def seconds(self) -> Spread:
        return Spread.of(self.samples)


@dataclass(frozen=True)
class DecodePoint:
    """One more token after `position` others. samples: seconds for a token of every sequence of the batch."""

    mixer: str
    position: int
    state_grows: bool
    samples: list[float]

    @property
    def seconds(self) -> Spread:
        return Spread.of(self.samples)


Point = TypeVar("Point", bound=SequencePoint | DecodePoint)


@dataclass(frozen=True)
class Report(BenchReport):
    """All points measured with the same settings in the same environment."""

    sequences: list[SequencePoint]
    decode: list[DecodePoint]

    @property
    def mixers(self) -> list[str]:
        """In the order they were measured."""
        return list(dict.fromkeys([*(p.mixer for p in self.sequences), *(p.mixer for p in self.decode)]))

    def sequence(self, mixer: str, step: str) -> dict[int, SequencePoint]:
        """By length, the shortest first."""
        return dict(sorted({p.length: p for p in self.sequences if (p.mixer, p.step) == (mixer, step)}.items()))

    def decoding(self, mixer: str) -> dict[int, DecodePoint]:
        """By position, the nearest first."""
        return dict(sorted({p.position: p for p in self.decode if p.mixer == mixer}.items()))

    def tokens_per_second(self, point: DecodePoint) -> float:
        """Of all sequences of the batch together."""
        return self.settings["batch"] / point.seconds.median


def missing(wanted: Iterable[int], found: Mapping[int, object]) -> list[int]:
    return sorted(set(wanted) - set(found))


# The measurement: a mixer on sequences of several lengths, and decoding at several positions

# Short sequences are called several times per sample, so that a sample has at least this many tokens.
TOKENS_PER_SAMPLE = 4096
# Tokens read to see whether a state grows, and to have one to go on from where it does not.
PREFILL = 16


def state_grows(mixer: Mixer, options: Options) -> bool:
    """Whether the mixer keeps every token, so that its time is quadratic in the length."""
    return Decoder.after(mixer.build(options), PREFILL, options.batch, options).grows


def measure_sequences(
    mixer: Mixer, step: str, lengths: Sequence[int], grows: bool, options: Options
) -> list[SequencePoint]:
    torch.manual_seed(options.seed)
    layer = mixer.build(options)
    memory = torch.randn(2, options.batch * max(lengths) * options.dim, **options.tensors)

    def call(length: int) -> Call:
        shape = options.batch, length, options.dim
        x, gradient = (part[: math.prod(shape)].view(shape).detach() for part in memory)
        return Call(layer, layer, x.requires_grad_(), gradient)

    calls = {length: call(length) for length in lengths}

    def sampled(length: int) -> float:
        """Seconds per token of a sample."""
        time = calls[length].time_forward if step == "forward" else calls[length].time_training
        repeats = max(1, TOKENS_PER_SAMPLE // length)
        return sum(time() for _ in range(repeats)) / (repeats * length * options.batch)

    seconds = timed(f"{mixer.prior} {step}", {length: partial(sampled, length) for length in lengths}, options)
    points = []
    for length, c in told(calls.items(), f"peaks of memory, {mixer.prior}"):
        peak = peak_memory(c.forward if step == "forward" else c.train_and_clear, c.x.device)
        points.append(SequencePoint(mixer.prior, step, length, grows, peak, seconds[length]))
    return points


def measure_decode(mixer: Mixer, positions: Sequence[int], grows: bool, options: Options) -> list[DecodePoint]:
    torch.manual_seed(options.seed)
    layer = mixer.build(options)
    if grows:
        decoders = {n: Decoder.after(layer, n, options.batch, options) for n in positions}
    else:
        # A state of constant size costs the same however many tokens led to it: only the position differs.
        decoder = Decoder.after(layer, PREFILL, options.batch, options)
        decoders = {n: decoder.at(n) for n in positions}
    times = timed(f"{mixer.prior} decode", {n: d.time for n, d in decoders.items()}, options)
    return [DecodePoint(mixer.prior, n, grows, times[n]) for n in positions]


def measure(report: Report, options: Options, save: Callable[[], None]) -> None:
    """Add the points that the report lacks, and save it whenever some are finished."""
    for mixer in options.mixers:
        grows = state_grows(mixer, options)
        lengths, positions = options.lengths, options.positions
        if grows:
            lengths = tuple(n for n in lengths if n <= options.quadratic_limit)
            positions = tuple(min(n, options.quadratic_limit) for n in positions)
        for step in options.passes:
            todo = missing(lengths, report.sequence(mixer.prior, step))
            if todo:
                report.sequences.extend(measure_sequences(mixer, step, todo, grows, options))
                save()
        todo = missing(positions, report.decoding(mixer.prior))
        if todo:
            report.decode.extend(measure_decode(mixer, todo, grows, options))
            save()


# The tables: the points, and how much they grow from a short length to the longest

# The project's target: time per token at 65536 tokens is at most this much more than at 4096, for one sequence.
FROM, TO, TARGET = 4096, 65536, 1.30


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s = report.settings
    target = TARGET if targets and s["batch"] == 1 else None
    setting = f"batch {s['batch']}, dim {s['dim']}, {report.heads}, parts {s['parts'] or '(mean)'}"
    above = f"One layer, eager: {setting}, {report.place('causal')}. "  # in front of the first table's title
    for step, name in PASSES.items():
        points = {mixer: line for mixer in report.mixers if (line := report.sequence(mixer, step))}
        if not points:
            continue
        title, above = f"{above}Time per token in µs, {name}", ""
        yield _grid(title, "tokens", points, lambda p: f"{p.seconds.median * 1e6:.2f}")
        yield _grid(f"Peak memory in MB, {name}", "tokens", points, lambda p: f"{p.peak_bytes / 1e6:.4g}")
        rows = [_growth_row(mixer, line, target) for mixer, line in points.items()]
        header = ("mixer", "tokens", "time per token", "peak memory per token")
        yield Table.of(header, rows, f"Growth with the length, {name} (1: linear)")
    decode = {mixer: steps for mixer in report.mixers if (steps := report.decoding(mixer))}
    yield _grid("Tokens per second, decoding", "tokens before", decode, lambda p: f"{report.tokens_per_second(p):.0f}")
    rows = []
    for mixer, steps in decode.items():
        first, last = steps[min(steps)], steps[max(steps)]
        growth = ratio_cell(paired_ratio(last.samples, first.samples))
        rows.append([label(mixer), f"{first.position} to {last.position}", growth])
    yield Table.of(("mixer", "tokens before", "time per token"), rows, "Growth with the position, decoding")


def _grid(title: str, axis: str, points: Mapping[str, Mapping[int, Point]], cell: Callable[[Point], str]) -> Table:
    columns = sorted({n for line in points.values() for n in line})
    rows = [[label(mixer), *(cell(line[n]) if n in line else "" for n in columns)] for mixer, line in points.items()]
    return Table.of([f"{axis}:", *map(str, columns)], rows, title)


def _growth_row(mixer: str, points: Mapping[int, SequencePoint], target: float | None) -> Row:
    """From 4096 tokens, or from the shortest where that was not measured or is the longest, to the longest."""
    last = points[max(points)]
    first = points[FROM if FROM in points and last.length > FROM else min(points)]
    judged = target if (first.length, last.length) == (FROM, TO) and not last.state_grows else None
    memory = (last.peak_bytes / last.length) / (first.peak_bytes / first.length)
    growth = paired_ratio(last.samples, first.samples)
    return [label(mixer), f"{first.length} to {last.length}", ratio_cell(growth, judged), ratio_cell(memory)]


# The figure: time per token, memory and speed of decoding, one line per mixer

_LOOK = {"linewidth": 1.6, "markersize": 5, "zorder": 3}


def draw(report: Report) -> Any:
    """One row of panels for the forward pass, and a second one where training was measured."""
    steps = [step for step in PASSES if any(p.step == step for p in report.sequences)]
    drawing = figures.figure(15.0, 0.4 + 3.8 * len(steps))
    panels = drawing.subplots(len(steps), 3, squeeze=False)
    looks = figures.looks([*map(label, report.mixers)], ATTENTION)

    def plot(axes: Any, mixer: str, points: Mapping[int, Point], value: Callable[[Point], float]) -> None:
        if points:
            axes.plot(list(points), [value(p) for p in points.values()], **looks[label(mixer)], **_LOOK)

    for row, step in zip(panels, steps, strict=True):
        time, memory, _ = row
        for mixer in report.mixers:
            points = report.sequence(mixer, step)
            plot(time, mixer, points, lambda p: p.seconds.median * 1e6)
            plot(memory, mixer, points, lambda p: p.peak_bytes / 1e6)
        _label(time, f"Time, {PASSES[step]}", "µs per token", "tokens of the sequence", 2)
        _label(memory, f"Peak memory, {PASSES[step]}", "MB", "tokens of the sequence", 2)
    decode = panels[0][2]
    for mixer in report.mixers:
        plot(decode, mixer, report.decoding(mixer), report.tokens_per_second)
    _label(decode, "Decoding", "tokens per second", "tokens seen before", 10)
    for row in panels[1:]:
        row[2].set_visible(False)
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels[0]), key=lambda found: len(found[1]))
    drawing.legend(handles, labels, loc="outside right center", frameon=False)
    s, threads = report.settings, report.environment["threads"]
    sequences = "one sequence" if s["batch"] == 1 else f"{s['batch']} sequences"
    title = f"One layer, {sequences}: dim {s['dim']}, {s['heads']} heads, {s['dtype']}, {threads} threads"
    drawing.suptitle(title)
    return drawing


def _label(axes: Any, title: str, ylabel: str, xlabel: str, base: int) -> None:
    ticker = require("matplotlib.ticker", "plot")
    axes.set_xscale("log", base=base)
    axes.set(yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left")
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(_short))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    low, high = axes.get_ylim()
    if high < 4 * low:  # noise of a flat line shall not fill the panel
        middle = (low * high) ** 0.5
        low, high = middle / 2, middle * 2
        axes.set_ylim(low, high)
    figures.plain_log(axes.yaxis, (1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 4, 5, 7))
    figures.quiet(axes)


def _short(value: float, _: object = None) -> str:
    """512, 64k (of 1024 where it is a power of two), 100k, 1M."""
    for size, letter in ((2**20, "M"), (1000**2, "M"), (2**10, "k"), (1000, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def run(options: Options) -> Report:
    """Measure what is not measured yet, and write scaling.json, scaling.md and scaling.png."""
    options.validate()
    for mixer in options.mixers:
        mixer.build(options)  # an option that does not fit shows now, not after the mixers before it
    options.out.mkdir(parents=True, exist_ok=True)
    with resumed(Report, options.out / NAME, options, options.overwrite) as (report, save):
        measure(report, options, save)
    write(options.out, [*tables(report, options.targets)], "scaling", ("md",))
    figures.save(draw(report), options.out / "scaling.png")
    return report


def main(args: Sequence[str]) -> int:
    return command(parse(Options, args, "bench scaling"), run, tables)
