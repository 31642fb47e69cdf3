"""`femixer bench layer`: one FEM layer against one softmax attention layer with as many parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from femixer.bench.calls import Call, Decoder, flops, peak_memory
from femixer.bench.contestants import ATTENTION, Mixer, Parameters, caches, canonical, check_priors
from femixer.bench.measure import (
    Benchmark,
    MixerOptions,
    Spread,
    Timing,
    busy,
    bytes_cell,
    fits,
    ratio_cell,
    timed,
    told,
    unlimited_compilation,
)
from femixer.bench.measure import Report as BenchReport
from femixer.options import Count, Whole, check, check_different
from femixer.priors import parse_prior
from femixer.reporting import Column, Table


@dataclass(frozen=True)
class Options(MixerOptions):
    """FEM layers against one softmax attention layer with as many parameters: speed, memory and FLOPs, as ratios.

    Times of a busy machine mean little by themselves. Every ratio here compares two calls of the same round, and the
    table gives the median over the rounds with the quartiles. The results are layer.json and layer.md.
    """

    priors: tuple[str, ...] = ("softmax",)
    """The priors of FEM, each alone or with options: gla, gla:decay=channel, name:option=value,option=value."""
    parts: tuple[str, ...] = ("LTG", "CLTG")
    """One FEM layer per prior for each: subsets of C (conditioner), L (free energy), T (its gate), G (outer gate)."""
    lengths: tuple[Count, ...] = (1024,)
    """Tokens of a sequence; a table for each."""
    forward_lengths: tuple[Count, ...] = ()
    """The same, where only the forward pass is measured."""
    encoder: bool = False
    """Every token sees all others, instead of the earlier ones only; then there is no decoding to measure."""
    modes: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    """eager: plain calls; compiled: torch.compile, whose own time is not counted."""
    context: Count = 4096
    """Tokens seen when decoding one more."""
    decode_batch: Count = 1
    """Sequences decoded side by side."""
    busy: Whole = 0
    """Measure with this many other processes computing beside it, each on one thread, as on a machine that is busy."""

    @property
    def mixers(self) -> list[Mixer]:
        """The rival first."""
        return [Mixer(), *(Mixer(prior, parts) for prior in self.priors for parts in self.parts)]

    def validate(self) -> None:
        super().validate()
        lengths = (*self.lengths, *self.forward_lengths)
        check(len({*lengths}) == len(lengths) > 0, "lengths with forward_lengths", lengths, "different ones")
        check_priors(self)
        check_different(self, "parts")
        check_different(self, "modes")


# The results


@dataclass(frozen=True)
class SequenceCost:
    """What a whole sequence costs. training: forward and backward, None where only the forward pass is measured.

    peak: the most bytes held beyond the weights and the input, gradients included, in training or else in the forward
    pass.
    """

    name: str
    prior: str
    parts: str | None
    mode: str
    length: int
    parameters: Parameters
    forward_flops: int
    training_flops: int | None
    forward: Timing
    training: Timing | None
    peak_bytes: int
    peak_ratio: float


@dataclass(frozen=True)
class DecodeCost:
    """What one more token costs, and the bytes of the state of one sequence.

    cache: which of the softmax prior's two; bytes_per_token: of the context, None where the state does not grow.
    """

    name: str
    prior: str
    parts: str | None
    cache: str | None
    step: Timing
    state_bytes: float
    state_ratio: float
    bytes_per_token: float | None


@dataclass(frozen=True)
class Report(BenchReport):
    layers: list[SequenceCost]
    decode: list[DecodeCost]


# The measurement


class Entry(NamedTuple):
    """A mixer in one mode: the name of a contestant."""

    mixer: Mixer
    mode: str


def contestants(options: Options, length: int) -> dict[Entry, Call]:
    x = torch.randn(options.batch, length, options.dim, **options.tensors).requires_grad_()
    gradient = torch.randn(x.shape, **options.tensors)
    field = {}
    for mode in options.modes:
        for mixer in options.mixers:
            layer = mixer.build(options, not options.encoder)
            function = torch.compile(layer, dynamic=False) if mode == "compiled" else layer
            field[Entry(mixer, mode)] = Call(function, layer, x, gradient)
    return field


class Fixed(NamedTuple):
    """What does not depend on the mode: parameters, and FLOPs of the forward pass and of forward and backward."""

    parameters: Parameters
    forward_flops: int
    training_flops: int | None


def counted(options: Options, length: int, training: bool) -> dict[Mixer, Fixed]:
    """From the shapes alone, on tensors without data."""
    nowhere: Any = "meta"  # no device that times could be measured on
    shapes = replace(options, device=nowhere, modes=("eager",))
    return {
        entry.mixer: Fixed(
            Parameters.of(entry.mixer, shapes, not options.encoder),
            flops(call.forward),
            flops(call.train_and_clear) if training else None,
        )
        for entry, call in contestants(shapes, length).items()
    }


def measure_sequences(options: Options, length: int, training: bool) -> list[SequenceCost]:
    counts = counted(options, length, training)
    field = contestants(options, length)
    for call in told(field.values(), f"first calls, {length} tokens"):
        call.forward()
        if training:
            call.train_and_clear()
    peaks = {
        entry: peak_memory(call.train_and_clear if training else call.forward, call.x.device)
        for entry, call in told(field.items(), f"peaks of memory, {length} tokens")
    }
    forward = timed(f"forward, {length} tokens", {entry: call.time_forward for entry, call in field.items()}, options)
    steps = {entry: call.time_training for entry, call in field.items()} if training else {}
    trained = timed(f"training, {length} tokens", steps, options) if training else {}
    return [
        SequenceCost(
            entry.mixer.name,
            entry.mixer.prior,
            entry.mixer.parts,
            entry.mode,
            length,
            *counts[entry.mixer],
            forward=Timing.of(forward[entry], forward[rival]),
            training=Timing.of(trained[entry], trained[rival]) if training else None,
            peak_bytes=peaks[entry],
            peak_ratio=peaks[entry] / peaks[rival],
        )
        for entry in field
        for rival in [Entry(Mixer(), entry.mode)]
    ]


def measure_decode(options: Options) -> list[DecodeCost]:
    field = {}
    for mixer in options.mixers:
        for cache in caches(mixer.prior, mixer.parts):
            layer = mixer.build(options, cache=cache)
            field[mixer, cache] = Decoder.after(layer, options.context, options.decode_batch, options)
    times = timed("decode", {entry: decoder.time for entry, decoder in field.items()}, options)
    rival = Mixer(), None
    return [
        DecodeCost(
            mixer.name,
            mixer.prior,
            mixer.parts,
            cache,
            Timing.of(times[mixer, cache], times[rival]),
            decoder.state_bytes,
            decoder.state_bytes / field[rival].state_bytes,
            decoder.state_bytes / options.context if decoder.grows else None,
        )
        for (mixer, cache), decoder in field.items()
    ]


def measure(options: Options) -> dict[str, Sequence[Any]]:
    lengths = [(length, length in options.lengths) for length in (*options.lengths, *options.forward_lengths)]
    with busy(options.busy):
        with unlimited_compilation("compiled" in options.modes):
            layers = [cost for length, training in lengths for cost in measure_sequences(options, length, training)]
        return {"layers": layers, "decode": [] if options.encoder else measure_decode(options)}


# The largest ratios to attention that the project is content with, and the sizes they are meant for


class Target(NamedTuple):
    """For the forward pass, forward and backward, and peak memory; None where there is none."""

    forward: float | None = None
    training: float | None = None
    memory: float | None = None


_SHARED = {"kv_heads": None, "batch": 2, "dtype": "float32", "device": "cpu", "encoder": False, "busy": 0}
SOFTMAX_SIZE = {**_SHARED, "dim": 768, "heads": 12}
LINEAR_TIME_SIZE = {**_SHARED, "dim": 512, "heads": 8}
DECODE_SIZE = {**SOFTMAX_SIZE, "context": 4096, "decode_batch": 1}


def _linear_time(forward: float, training: float, forward_8192: float) -> dict[int, Target]:
    return {1024: Target(forward, training), 8192: Target(forward_8192)}


# By parts and length, eager and compiled.
SOFTMAX = {("LTG", 1024): Target(1.05, 1.10, 1.35), ("CLTG", 1024): Target(1.10, 1.20, 1.60)}
# By prior and length, with all parts, eager.
LINEAR_TIME = {
    "linear": _linear_time(0.85, 0.80, 0.28),
    "gla": _linear_time(0.85, 0.80, 0.28),
    "gla:decay=channel": _linear_time(1.5, 1.5, 0.48),
    "aft": _linear_time(0.75, 0.75, 0.26),
    "decay": _linear_time(0.75, 0.75, 0.26),
    "ssm": _linear_time(1.3, 1.5, 0.42),
    "mamba": _linear_time(1.3, 1.5, 0.42),
}
# By what the softmax prior caches.
DECODE = {"exp": 1.15, "value": 1.60}


def sequence_target(cost: SequenceCost, settings: Mapping[str, Any]) -> Target:
    """The target for a layer, without numbers where the measurement has another size than it is meant for."""
    if cost.prior == ATTENTION:
        return Target()
    prior = canonical(cost.prior)
    if prior == "softmax":
        return SOFTMAX.get((cost.parts or "", cost.length), Target()) if fits(settings, SOFTMAX_SIZE) else Target()
    at_size = fits(settings, LINEAR_TIME_SIZE) and cost.parts == "CLTG" and cost.mode == "eager"
    return LINEAR_TIME.get(prior, {}).get(cost.length, Target()) if at_size else Target()


# The tables: one per length and mode, and one for decoding

FLOPS_NOTE = "GFLOPs: matrix products as plain torch computes them; scans per channel are elementwise and do not count."


def tables(report: Report, targets: bool) -> Iterator[Table]:
    s = {"busy": 0, **report.settings}  # files from before there was --busy
    place = report.place("encoder" if s["encoder"] else "causal")
    setting = f"dim {s['dim']}, {report.heads}, {place}"
    if s["busy"]:
        setting += f", beside {s['busy']} busy {'process' if s['busy'] == 1 else 'processes'}"
    notes = () if all(parse_prior(prior)[0] == "softmax" for prior in s["priors"]) else (FLOPS_NOTE,)
    for length in (*s["lengths"], *s["forward_lengths"]):
        trained = length in s["lengths"]
        columns: list[Column | str] = ["layer", "parameters", "GFLOPs", "forward ms", _ratio_column("forward_ratio")]
        columns += ["forward + backward ms", _ratio_column("training_ratio")] if trained else []
        columns += ["peak MB" if trained else "forward peak MB", _ratio_column("peak_ratio")]
        for mode in s["modes"]:
            costs = [cost for cost in report.layers if (cost.length, cost.mode) == (length, mode)]
            rows = [_sequence_row(cost, sequence_target(cost, s) if targets else Target()) for cost in costs]
            title = f"One layer, {mode}: {length} tokens, batch {s['batch']}, {setting}"
            yield Table.of(columns, rows, title, *notes)
    if report.decode:
        most = DECODE if targets and fits(s, DECODE_SIZE) else {}
        rows = [_decode_row(cost, most.get(cost.cache or "")) for cost in report.decode]
        title = f"Decoding one token, eager: context {s['context']}, batch {s['decode_batch']}, {setting}"
        columns = ["layer", "cache", "ms per token", _ratio_column("time_ratio")]
        columns += ["state bytes", _ratio_column("state_ratio"), "bytes per token of context"]
        yield Table.of(columns, rows, title)


def _ratio_column(key: str) -> Column:
    return Column("ratio", key, "right")


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
        bytes_cell(cost.state_bytes),
        _ratio(cost, cost.state_ratio),
        bytes_cell(cost.bytes_per_token),
    ]


def _ratio(cost: SequenceCost | DecodeCost, ratio: Spread | float, target: float | None = None) -> str:
    return "1" if cost.prior == ATTENTION else ratio_cell(ratio, target)


BENCHMARK = Benchmark("layer", Options, measure, Report, tables)
run, main = BENCHMARK.run, BENCHMARK.main
