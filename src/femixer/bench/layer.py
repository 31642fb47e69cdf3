"""`femixer bench layer`: one FEM layer against one softmax attention layer with as many parameters."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from femixer import __version__
from femixer.baselines import Attention
from femixer.bench.measure import (
    Spread,
    cpu_threads,
    flops,
    held_bytes,
    paired_ratio,
    peak_memory,
    race,
    stopwatch,
)
from femixer.bench.table import Table
from femixer.mixer import FreeEnergyMixer
from femixer.optional import require
from femixer.options import check, parse
from femixer.priors.softmax import CACHES
from femixer.state import SPARE
from femixer.training import atomic

ATTENTION = "attention"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    """One FEM layer against one softmax attention layer with as many parameters: speed, memory and FLOPs, as ratios.

    Times of a busy machine mean little by themselves. Every ratio here compares two calls of the same round, and the
    table gives the median over the rounds with the quartiles.
    """

    dim: int = 768
    """Width of the tokens."""
    heads: int = 12
    """Heads; divides dim."""
    kv_heads: int | None = None
    """Key/value heads; divides heads (default: as many as heads)."""
    length: int = 1024
    """Tokens of a sequence."""
    batch: int = 2
    """Sequences."""
    prior: str = "softmax"
    """The prior of FEM."""
    parts: tuple[str, ...] = ("LTG", "CLTG")
    """One FEM layer for each: subsets of C (conditioner), L (free energy), T (temperature gate), G (outer gate)."""
    encoder: bool = False
    """Every token sees all others, instead of the earlier ones only; then there is no decoding to measure."""
    modes: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    """eager: plain calls; compiled: torch.compile, whose own time is not counted."""
    context: int = 4096
    """Tokens in the cache when decoding one more."""
    decode_batch: int = 1
    """Sequences decoded side by side."""
    decode_steps: int = 16
    """Tokens decoded per sample; the cache grows by them and starts at `context` again."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number format of weights and tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    threads: int | None = None
    """CPU threads (default: torch's choice)."""
    rounds: int = 20
    """Rounds measured; a round is one sample of every contestant."""
    warmup: int = 3
    """Rounds before that, not counted."""
    seed: int = 0
    """Seed of weights and tokens."""
    targets: bool = False
    """Show the project's target beside each ratio."""
    out: Path = Path("results/bench")
    """Folder for layer.json and layer.md."""

    def validate(self) -> None:
        """Raise a ValueError that names the first value that makes no sense; the layers check their own."""
        for name in ("length", "batch", "context", "decode_batch", "rounds"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a whole number above 0")
        check(self.warmup >= 0, "warmup", self.warmup, "a whole number of at least 0")
        check(0 < self.decode_steps <= SPARE, "decode_steps", self.decode_steps, f"a whole number from 1 to {SPARE}")
        check(self.threads is None or self.threads > 0, "threads", self.threads, "a whole number above 0")
        for name in ("parts", "modes"):
            given = getattr(self, name)
            check(len(set(given)) == len(given) > 0, name, given, "one or more, each once")
        for mode in self.modes:
            check(mode in ("eager", "compiled"), "modes", mode, "eager, compiled or both")
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        usable = self.device == "cpu" or (self.device == "cuda" and torch.cuda.is_available())
        check(not self.out.exists() or self.out.is_dir(), "out", str(self.out), "a folder")
        check(usable, "device", self.device, "cpu, or cuda where torch finds one")


class Target(NamedTuple):
    """The largest ratios to attention that the project is content with."""

    forward: float
    training: float
    memory: float


TARGETS = {"LTG": Target(1.05, 1.10, 1.35), "CLTG": Target(1.10, 1.20, 1.60)}
DECODE_TARGETS = {"exp": 1.15, "value": 1.60}


@dataclass(frozen=True)
class Parameters:
    """How many there are; all parts share the budget of the matrices, the conditioner comes on top."""

    total: int
    matrices: int
    biases: int
    temperatures: int
    conditioner: int
    conditioner_share: float


@dataclass(frozen=True)
class Timing:
    """Seconds of a call, and the ratio to attention's call of the same round."""

    seconds: Spread
    ratio: Spread
    samples: Sequence[float]


@dataclass(frozen=True)
class LayerCost:
    """What a whole sequence costs. training: forward and backward; peak: the most bytes it holds beyond the weights and
    the input, gradients included."""

    name: str
    parts: str | None
    mode: str
    parameters: Parameters
    forward_flops: int
    training_flops: int
    forward: Timing
    training: Timing
    peak_bytes: int
    peak_ratio: float


@dataclass(frozen=True)
class DecodeCost:
    """What one more token costs, and the bytes of the cache per token of the context."""

    name: str
    cache: str | None
    step: Timing
    cache_bytes_per_token: float
    cache_ratio: float


@dataclass(frozen=True)
class Report:
    settings: dict[str, Any]
    environment: dict[str, Any]
    layers: list[LayerCost]
    decode: list[DecodeCost]


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench layer")
    report = run(options)
    for table in tables(report, options.targets):
        table.show()
    print(f"Results are in {options.out}/")
    return 0


def run(options: Options) -> Report:
    """Measure, and write layer.json and layer.md."""
    options.validate()
    options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
    with cpu_threads(options.threads) as threads:
        torch.manual_seed(options.seed)
        layers = measure_layers(options)
        decode = [] if options.encoder else measure_decode(options)
    settings = asdict(options)
    del settings["out"], settings["targets"]
    report = Report(settings, environment(threads, options.device), layers, decode)
    atomic.write(options.out / "layer.json", json.dumps({"benchmark": "layer", **asdict(report)}, indent=2) + "\n")
    text = "\n\n".join(table.markdown() for table in tables(report, options.targets))
    atomic.write(options.out / "layer.md", text + "\n")
    return report


def environment(threads: int, device: str) -> dict[str, Any]:
    return {
        "femixer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "instructions": torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name(),
    }


def build(options: Options, parts: str | None, prior_options: dict[str, Any] | None = None) -> nn.Module:
    """The FEM layer with these parts; the attention layer for None."""
    shared: dict[str, Any] = {
        "causal": not options.encoder,
        "kv_heads": options.kv_heads,
        "device": options.device,
        "dtype": DTYPES[options.dtype],
    }
    if parts is None:
        return Attention(options.dim, options.heads, **shared)
    return FreeEnergyMixer(options.dim, options.heads, options.prior, parts, prior_options=prior_options, **shared)


def label(parts: str | None) -> str:
    return ATTENTION if parts is None else f"FEM {parts or '(mean)'}"


def count_parameters(options: Options, parts: str | None) -> Parameters:
    def total(layer: nn.Module, kind: str = "") -> int:
        return sum(p.numel() for name, p in layer.named_parameters() if name.endswith(kind))

    layer = build(options, parts)
    # The same layer without a conditioner: its other widths do not depend on it.
    plain = build(options, parts.replace("C", "")) if parts else layer
    matrices, biases = total(plain, "weight"), total(plain, "bias")
    conditioner = total(layer) - total(plain)
    return Parameters(
        total=total(layer),
        matrices=matrices,
        biases=biases,
        temperatures=total(plain) - matrices - biases,
        conditioner=conditioner,
        conditioner_share=conditioner / total(layer),
    )


class Contestant(NamedTuple):
    """A layer of one run, called in one way, and what can be measured of it."""

    parts: str | None
    mode: str
    layer: nn.Module
    call: Callable[[Tensor], Tensor]
    x: Tensor
    gradient: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(self.x)

    def train(self) -> None:
        self.call(self.x).backward(self.gradient)

    def clear(self) -> None:
        """Drop the gradients, so that every step allocates them anew, as training does."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def train_and_clear(self) -> None:
        self.train()
        self.clear()

    def time_forward(self) -> float:
        return stopwatch(self.forward, self.x.device)

    def time_training(self) -> float:
        seconds = stopwatch(self.train, self.x.device)
        self.clear()
        return seconds


def contestants(options: Options) -> dict[str, Contestant]:
    made: dict[str, Any] = {"device": options.device, "dtype": DTYPES[options.dtype]}
    x = torch.randn(options.batch, options.length, options.dim, **made).requires_grad_()
    gradient = torch.randn(x.shape, **made)
    found = {}
    for mode in options.modes:
        for parts in (None, *options.parts):
            layer = build(options, parts)
            call = torch.compile(layer, dynamic=False) if mode == "compiled" else layer
            found[f"{mode} {label(parts)}"] = Contestant(parts, mode, layer, call, x, gradient)
    return found


def measure_layers(options: Options) -> list[LayerCost]:
    field = contestants(options)
    counted = {c.parts: _count(options, c) for c in field.values()}
    with progress("first calls", len(field)) as advance:
        for c in field.values():
            c.forward()
            c.train_and_clear()
            advance()
    with progress("peak memory", len(field)) as advance:
        peaks = {}
        for name, c in field.items():
            peaks[name] = peak_memory(c.train_and_clear, c.x.device)
            advance()
    with progress("forward", options.warmup + options.rounds) as advance:
        forward = race({name: c.time_forward for name, c in field.items()}, options.rounds, options.warmup, advance)
    with progress("forward + backward", options.warmup + options.rounds) as advance:
        training = race({name: c.time_training for name, c in field.items()}, options.rounds, options.warmup, advance)
    return [
        LayerCost(
            label(c.parts),
            c.parts,
            c.mode,
            *counted[c.parts],
            forward=_timing(forward[name], forward[rival]),
            training=_timing(training[name], training[rival]),
            peak_bytes=peaks[name],
            peak_ratio=peaks[name] / peaks[rival],
        )
        for name, c in field.items()
        for rival in [f"{c.mode} {ATTENTION}"]
    ]


def _count(options: Options, c: Contestant) -> tuple[Parameters, int, int]:
    """Parameters and FLOPs (forward; forward and backward); they do not depend on the mode."""
    plain = c._replace(call=c.layer)
    return count_parameters(options, c.parts), flops(plain.forward), flops(plain.train_and_clear)


def _timing(seconds: Sequence[float], reference: Sequence[float]) -> Timing:
    return Timing(Spread.of(seconds), paired_ratio(seconds, reference), seconds)


class Decoder(NamedTuple):
    """A layer that has read the context. The state is never continued twice: that would copy the cache."""

    layer: nn.Module
    state: Any
    tokens: Tensor  # [steps, B, 1, dim]
    cache_bytes_per_token: float

    @classmethod
    def of(cls, options: Options, layer: nn.Module) -> Decoder:
        made: dict[str, Any] = {"device": options.device, "dtype": DTYPES[options.dtype]}
        prompt = torch.randn(options.decode_batch, options.context, options.dim, **made)
        tokens = torch.randn(options.decode_steps, options.decode_batch, 1, options.dim, **made)
        with torch.inference_mode():
            _, state = layer(prompt, return_state=True)
            size = held_bytes(state) / prompt.shape[:2].numel()
            # A cache gets room to grow with its first new token, which therefore costs more than the others.
            _, state = layer(tokens[0], state=state, return_state=True)
        return cls(layer, state, tokens, size)

    def time(self) -> float:
        """Seconds per token."""
        with torch.inference_mode():
            state = copy.deepcopy(self.state)

            def steps() -> None:
                nonlocal state
                for token in self.tokens:
                    _, state = self.layer(token, state=state, return_state=True)

            return stopwatch(steps, self.tokens.device) / len(self.tokens)


def measure_decode(options: Options) -> list[DecodeCost]:
    field = {(ATTENTION, ""): Decoder.of(options, build(options, None))}
    for parts in options.parts:
        # Only the softmax prior has a choice, and only where there is an exponential to keep.
        for cache in CACHES if options.prior == "softmax" and "L" in parts else [""]:
            layer = build(options, parts, {"cache": cache} if cache else None)
            field[label(parts), cache] = Decoder.of(options, layer)
    samples = {f"{name} {cache}": decoder.time for (name, cache), decoder in field.items()}
    with progress("decode", options.warmup + options.rounds) as advance:
        times = race(samples, options.rounds, options.warmup, advance)
    rival, size = times[f"{ATTENTION} "], field[ATTENTION, ""].cache_bytes_per_token
    return [
        DecodeCost(
            name,
            cache or None,
            _timing(times[f"{name} {cache}"], rival),
            decoder.cache_bytes_per_token,
            decoder.cache_bytes_per_token / size,
        )
        for (name, cache), decoder in field.items()
    ]


def tables(report: Report, targets: bool) -> Iterator[Table]:
    """One table per mode and one for decoding."""
    s, e = report.settings, report.environment
    grouped = "" if s["kv_heads"] is None else f" ({s['kv_heads']} for keys and values)"
    setting = (
        f"{s['prior']} prior, dim {s['dim']}, {s['heads']} heads{grouped}, {s['dtype']}, "
        f"{'encoder' if s['encoder'] else 'causal'}, {e['threads']} threads, torch {e['torch']}"
    )
    judged = targets and s["prior"] == "softmax"
    for mode in s["modes"]:
        rows = [_layer_row(cost, judged) for cost in report.layers if cost.mode == mode]
        title = f"One layer, {mode}: {s['length']} tokens, batch {s['batch']}, {setting}"
        header = (
            "layer",
            "parameters",
            "GFLOPs",
            "forward ms",
            "ratio",
            "forward + backward ms",
            "ratio",
            "peak MB",
            "ratio",
        )
        yield Table(title, header, rows)
    if report.decode:
        rows = [_decode_row(cost, judged) for cost in report.decode]
        title = f"Decoding one token, eager: context {s['context']}, batch {s['decode_batch']}, {setting}"
        yield Table(title, ("layer", "cache", "ms per token", "ratio", "cache bytes per token", "ratio"), rows)


def _layer_row(cost: LayerCost, judged: bool) -> list[str]:
    target = TARGETS.get(cost.parts or "") if judged else None
    share = f" ({cost.parameters.conditioner_share:.1%} conditioner)" if cost.parameters.conditioner else ""
    return [
        cost.name,
        f"{cost.parameters.total:,}{share}",
        f"{cost.forward_flops / 1e9:.4g}",
        f"{cost.forward.seconds.median * 1e3:.2f}",
        _ratio(cost.forward.ratio, cost.parts is None, target and target.forward),
        f"{cost.training.seconds.median * 1e3:.2f}",
        _ratio(cost.training.ratio, cost.parts is None, target and target.training),
        f"{cost.peak_bytes / 1e6:.4g}",
        _ratio(cost.peak_ratio, cost.parts is None, target and target.memory),
    ]


def _decode_row(cost: DecodeCost, judged: bool) -> list[str]:
    rival = cost.name == ATTENTION
    target = DECODE_TARGETS.get(cost.cache or "") if judged else None
    return [
        cost.name,
        cost.cache or "",
        f"{cost.step.seconds.median * 1e3:.3f}",
        _ratio(cost.step.ratio, rival, target),
        f"{cost.cache_bytes_per_token:,.0f}",
        _ratio(cost.cache_ratio, rival, None),
    ]


def _ratio(ratio: Spread | float, rival: bool, target: float | None) -> str:
    if rival:
        return "1"
    if isinstance(ratio, Spread):
        value, text = ratio.median, f"{ratio.median:.3f} [{ratio.q1:.3f}–{ratio.q3:.3f}]"
    else:
        value, text = ratio, f"{ratio:.3f}"
    return text if target is None else f"{text} {'≤' if value <= target else '>'} {target:.2f}"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error; gives the function that moves it by one."""
    rich, console = require("rich.progress", "cli"), require("rich.console", "cli").Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{what:<18}", total=total)
        yield lambda: bar.advance(task)
