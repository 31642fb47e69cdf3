"""`femixer bench gpu`: layers and models on a GPU against torch's flash attention and, where they are installed,
flash-linear-attention and mamba_ssm; or, on a machine without one, an estimate of the layers from their traces.

An estimate is the roofline of every launch, max(bytes / bandwidth, flops / tensor rate, exponentials / their rate,
bytes that programs load again / cache bandwidth), and an overhead per launch. It knows nothing of occupancy and stalls:
it says what a kernel could reach.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer import FreeEnergyMixer, __version__, use_backend
from femixer.baselines import Attention
from femixer.bench.contestants import ATTENTION, arguments
from femixer.bench.measure import DTYPES, stopwatch
from femixer.kernels import dispatch
from femixer.kernels.triton_launch import Step, aimed_at, traced
from femixer.options import Count, Rule, check_options, parse
from femixer.priors import parse_prior
from femixer.reporting import Table, show
from femixer.training import atomic

NumberFormat = Annotated[str, Rule("one of float32, bfloat16", lambda x: x in ("float32", "bfloat16"))]
# Layers of other packages: module, class, and arguments from (dim, heads).
RIVALS: dict[str, tuple[str, str, Callable[[int, int], dict[str, Any]]]] = {
    "fla linear": ("fla.layers", "LinearAttention", lambda d, h: {"hidden_size": d, "num_heads": h}),
    "fla gla": ("fla.layers", "GatedLinearAttention", lambda d, h: {"hidden_size": d, "num_heads": h}),
    "mamba_ssm": ("mamba_ssm", "Mamba", lambda d, h: {"d_model": d}),
}


class Gpu(NamedTuple):
    """Figures of the maker: bytes per second; dense tensor flops per second in bfloat16 and TF32; of plain float32;
    exponentials per second (special-function units x clock); bytes per second of the cache that all programs share.

    The last one: 5,120 bytes per clock of A100 and H100, MI300X's Infinity Cache; of the L40S nobody says, so half of
    that per clock, which is what such chips are measured to have.
    """

    target: str
    bandwidth: float
    bfloat16: float
    tf32: float
    float32: float
    exponentials: float
    cache: float

    def seconds(self, step: Step) -> float:
        rate = self.bfloat16
        if step.dtype == torch.float32:
            # NVIDIA's kernels keep float32's digits by three TF32 products; all other products use plain float32.
            three = step.kernel and self.target.startswith("sm_")
            rate = max(self.tf32 / 3, self.float32) if three else self.float32
        work = (
            step.bytes / self.bandwidth,
            step.flops / rate,
            step.exponentials / self.exponentials,
            step.loaded / self.cache,
        )
        return max(work) / REACHED + OVERHEAD


GPUS = {
    "A100": Gpu("sm_80", 2.04e12, 312e12, 156e12, 19.5e12, 108 * 16 * 1.41e9, 5120 * 1.41e9),
    "L40S": Gpu("sm_89", 0.864e12, 362e12, 183e12, 91.6e12, 142 * 16 * 2.52e9, 2560 * 2.52e9),
    "H100": Gpu("sm_90", 3.35e12, 989e12, 495e12, 67e12, 132 * 16 * 1.83e9, 5120 * 1.83e9),
    "MI300X": Gpu("gfx942", 5.3e12, 1307e12, 654e12, 163e12, 304 * 16 * 2.1e9, 17.2e12),
}
# The part of the maker's figures that is taken as reached, and seconds per launch. Both are assumptions.
REACHED, OVERHEAD = 0.75, 2.5e-6
# Rows or keys of a tile of the flash attention that we compare with.
FLASH = 128


@dataclass(frozen=True)
class Options:
    """Latency, throughput and memory of layers and models on a GPU, or an estimate of the layers without one."""

    estimate: bool = False
    """Estimate from traces, without a GPU."""
    kernels: bool = False
    """With --estimate: also the table of launches of every layer."""
    priors: tuple[str, ...] = ("softmax", "fox", "linear", "gla", "aft", "decay", "ssm", "mamba", "mamba-interactive")
    """Priors of the FEM layers, with options as in gla:decay=channel."""
    dim: Count = 1024
    """Width of the layers."""
    heads: Count = 16
    """Heads of the layers."""
    batch: Count = 8
    """Sequences at a time."""
    lengths: tuple[Count, ...] = (2048, 8192)
    """Tokens of a sequence."""
    dtypes: tuple[NumberFormat, ...] = ("float32", "bfloat16")
    """Number formats of parameters and inputs."""
    models: tuple[str, ...] = ()
    """Also a training step of these presets of language models, e.g. 340m, at the first length."""
    repeats: Count = 10
    """Measurements per case; the median is reported."""
    device: str = "cuda"
    """Where to measure."""
    out: Path = Path("results/bench")
    """Folder of gpu.json, the file to attach to a report."""

    def validate(self) -> None:
        check_options(self)
        for prior in self.priors:
            parse_prior(prior)
        if not self.estimate and self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("device='cuda' is not there: torch sees no GPU; --estimate needs none")


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "bench gpu")
    options.validate()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = estimated(options) if options.estimate else measured(options)
    there = not options.estimate and options.device.startswith("cuda")
    surroundings = {
        "femixer": __version__,
        "torch": torch.__version__,
        "triton": dispatch.triton_version(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "gpu": torch.cuda.get_device_name(options.device) if there else None,
    }
    report = {"benchmark": "gpu", "estimate": options.estimate, "environment": surroundings}
    report |= {"options": {**asdict(options), "out": None}, "rows": rows}
    atomic.write(options.out / "gpu.json", json.dumps(report, indent=2) + "\n")
    show(*(estimate_tables(options, rows) if options.estimate else [measurement_table(rows)]))
    print(f"Results are in {options.out}/gpu.json")
    return 0


def fem_layer(prior: str, options: Options, **made: Any) -> FreeEnergyMixer:
    return FreeEnergyMixer(options.dim, options.heads, **arguments(prior), **made)


# Estimate


class Traces(NamedTuple):
    forward: list[Step]
    backward: list[Step]


def trace(layer: nn.Module, batch: int, length: int, dim: int, dtype: torch.dtype) -> Traces:
    """A training step of a layer on tensors without data."""
    x = torch.empty(batch, length, dim, device="meta", dtype=dtype, requires_grad=True)
    with use_backend("triton"):
        with traced() as forward:
            y = layer(x)
        gradient = torch.empty_like(y)
        with traced() as backward:
            y.backward(gradient)
    return Traces(forward, backward)


def attention_traces(options: Options, length: int, dtype: torch.dtype) -> Traces:
    """Torch's flash attention by hand, because it has no form without data: projections of q, k and v as one product, a
    fused rotation, the flash kernel, which halves its work where the mask is causal, and the output projection. Its
    tiles have FLASH rows forward and as many keys backward. Backward there are three kernels: <o, to_o> of every row,
    which also clears the float32 sums of the queries' gradients; the gradients, with these added up in the cache; and
    their cast, which float32 does without."""
    tokens, dim, size = options.batch * length, options.dim, dtype.itemsize
    x, pairs = tokens * dim * size, options.batch * options.heads * length * length // 2
    width = dim // options.heads
    products = 4 * pairs * width

    def linear(name: str, columns: int, times: int = 1) -> list[Step]:
        moved = x * (1 + columns) + dim * dim * columns * size
        return [Step(name, False, moved, 2 * tokens * dim * dim * columns, 0, dtype)] * times

    again = pairs // FLASH * width * 2 * size
    rotation, bias = Step("rotary", True, 4 * x, 0, 0, dtype), Step("sum", False, 4 * x, 0, 0, dtype)
    forward = [
        *linear("qkv", 3),
        rotation,
        Step("flash", True, 4 * x, products, pairs, dtype, again),
        *linear("out", 1),
    ]
    sums = tokens * dim * 4
    added = again + pairs // FLASH * width * 4
    flash = [
        Step("flash row sums", True, 2 * x + sums, 0, 0, dtype),
        Step("flash backward", True, 6 * x + 2 * sums, 5 * products // 2, pairs, dtype, added),
        *([] if size == 4 else [Step("flash cast", True, sums + x, 0, 0, dtype)]),
    ]
    backward = [*linear("out backward", 1, 2), *flash, rotation, *linear("qkv backward", 3, 2), bias]
    return Traces(forward, backward)


def estimated(options: Options) -> list[dict[str, Any]]:
    rows = []
    for dtype_name, length, (gpu_name, gpu) in product(options.dtypes, options.lengths, GPUS.items()):
        dtype = DTYPES[dtype_name]
        field = {ATTENTION: attention_traces(options, length, dtype)}
        for prior in options.priors:
            with aimed_at(gpu.target):
                layer = fem_layer(prior, options, device="meta", dtype=dtype)
                field[f"FEM {prior}"] = trace(layer, options.batch, length, options.dim, dtype)
        others = [sum(map(gpu.seconds, steps)) for steps in field[ATTENTION]]
        for name, traces in field.items():
            times = [sum(map(gpu.seconds, steps)) for steps in traces]
            row = {"layer": name, "dtype": dtype_name, "length": length, "gpu": gpu_name}
            row |= {"forward ms": 1e3 * times[0], "backward ms": 1e3 * times[1]}
            row |= {"forward ratio": times[0] / others[0], "step ratio": sum(times) / sum(others)}
            row["launches"] = [len(steps) for steps in traces]
            row["kernels"] = [[*step[:5], step.loaded, 1e6 * gpu.seconds(step)] for steps in traces for step in steps]
            rows.append(row)
    return rows


ASSUMPTIONS = (
    "ESTIMATE, not a measurement: milliseconds forward + backward of one layer, and in brackets its training step as a "
    "multiple of the one with flash attention. Each launch takes max(bytes / bandwidth, flops / tensor rate, "
    "exponentials / special-function rate, bytes loaded again / cache bandwidth) / {reached} + {micros} us; the rates "
    "are the makers' figures. B {o.batch}, dim {o.dim}, {o.heads} heads, causal, all parts. In float32 kernels take "
    "three TF32 products, torch's products are plain float32."
)


def estimate_tables(options: Options, rows: list[dict[str, Any]]) -> Iterator[Table]:
    layers: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        layers.setdefault((row["layer"], row["dtype"], str(row["length"])), []).append(row)
    cells = []
    for key, of in layers.items():  # a row of each GPU
        shown = (f"{c['forward ms']:.2f}+{c['backward ms']:.2f} ({c['step ratio']:.2f})" for c in of)
        cells.append([*key, "{}+{}".format(*of[0]["launches"]), *shown])
    title = ASSUMPTIONS.format(o=options, reached=REACHED, micros=1e6 * OVERHEAD)
    yield Table.of(("layer", "type", "T", "launches", *GPUS), cells, title)
    for row in rows if options.kernels else ():
        if row["gpu"] == "H100":
            title = f"{row['layer']}, {row['dtype']}, T {row['length']}, H100"
            launches = []
            for name, ours, size, flops, exponentials, again, micros in row["kernels"]:
                work = (f"{size / 1e6:.2f}", f"{flops / 1e9:.2f}", f"{exponentials / 1e9:.3f}", f"{again / 1e9:.2f}")
                launches.append([name if ours else f"{name} (torch)", *work, f"{micros:.1f}"])
            yield Table.of(("launch", "MB", "GFLOP", "Gexp", "again GB", "us"), launches, title)


# Measurement


def measured(options: Options) -> list[dict[str, Any]]:
    rows = []
    for dtype in options.dtypes:
        made = {"device": options.device, "dtype": DTYPES[dtype]}
        each = product(options.lengths, contestants(options, made))
        cases = [(name, length, partial(_layer_costs, build)) for length, (name, build) in each]
        for preset in options.models:
            named = {ATTENTION: {"mixer": ATTENTION}, **{f"FEM {prior}": _of_model(prior) for prior in options.priors}}
            length = options.lengths[0]
            cases += [(f"{preset} {name}", length, partial(_model_costs, preset, of)) for name, of in named.items()]
        for name, length, costs in cases:
            row = {"layer": name, "dtype": dtype, "length": length}
            try:
                rows.append({**row, **costs(options, length, made)})
            except Exception as error:  # one that does not fit into memory must not cost the others
                rows.append({**row, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    return rows


def contestants(options: Options, made: dict[str, Any]) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    yield ATTENTION, lambda: Attention(options.dim, options.heads, **made)
    for prior in options.priors:
        yield f"FEM {prior}", lambda prior=prior: fem_layer(prior, options, **made)  # type: ignore[misc]
    for name, (module, kind, sizes) in RIVALS.items():
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            given = sizes(options.dim, options.heads)
            yield name, lambda m=module, k=kind, g=given: getattr(importlib.import_module(m), k)(**g).to(**made)  # type: ignore[misc]


def _of_model(prior: str) -> dict[str, Any]:
    """Fields of a language model's configuration."""
    name, options = parse_prior(prior)
    return {"prior": name, "prior_options": {name: options}}


def _layer_costs(
    build: Callable[[], nn.Module], options: Options, length: int, made: dict[str, Any]
) -> dict[str, float]:
    layer: Any = build()
    x = torch.randn(options.batch, length, options.dim, requires_grad=True, **made)

    def read() -> Tensor:
        y = layer(x)
        return y[0] if isinstance(y, tuple) else y

    def step() -> None:
        y = read()
        torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y), allow_unused=True)

    with torch.no_grad():
        forward = _median_seconds(read, options)
    found = {"forward ms": 1e3 * forward, **_step_costs(step, options, length)}
    if isinstance(layer, (FreeEnergyMixer, Attention)):
        with torch.no_grad():
            _, state = layer(x, return_state=True)
            token = _median_seconds(lambda: layer(x[:, :1], state=state, return_state=True), options)
        found["token ms"] = 1e3 * token
    return found


def _model_costs(
    preset: str, fields: dict[str, Any], options: Options, length: int, made: dict[str, Any]
) -> dict[str, float]:
    """A training step of a language model."""
    models = importlib.import_module("femixer.models")
    model = models.FEMForCausalLM(models.preset(preset, vocab_size=32000, **fields)).to(**made)
    ids = torch.randint(32000, (options.batch, length), device=options.device)

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return _step_costs(step, options, length)


def _step_costs(step: Callable[[], object], options: Options, length: int) -> dict[str, float]:
    seconds = _median_seconds(step, options)
    found = {"step ms": 1e3 * seconds, "tokens per second": options.batch * length / seconds}
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(options.device)
        step()
        found["peak MB"] = torch.cuda.max_memory_allocated(options.device) / 1e6
    return found


def _median_seconds(call: Callable[[], object], options: Options) -> float:
    times = [stopwatch(call, torch.device(options.device)) for _ in range(options.repeats + 2)]
    return statistics.median(times[2:])  # the first compiles, the second fills caches


def measurement_table(rows: list[dict[str, Any]]) -> Table:
    numbers = ("forward ms", "step ms", "token ms", "tokens per second", "peak MB")
    cells = [
        [row["layer"], row["dtype"], str(row["length"]), *(f"{row[n]:.3f}" if n in row else "" for n in numbers)]
        for row in rows
    ]
    failed = [f"{row['layer']}, {row['dtype']}, T {row['length']}: {row['error']}" for row in rows if "error" in row]
    return Table.of(("layer", "type", "T", *numbers), cells, "", *failed)
