"""Compiles every Triton kernel, as the layers launch it, for GPUs that are not here: registers, spills, shared memory.

Layers of all priors run on tensors without data, training and decoding, and each form of a kernel that they launch is
compiled once. Results are kept beside Triton's own cache until the kernel or Triton changes, so a stopped run
continues where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer import FreeEnergyMixer, use_backend
from femixer.kernels.triton_compile import Source, Usage, compile_for, sources, version_of
from femixer.kernels.triton_launch import Launch, aimed_at, recorded
from femixer.priors import PRIORS
from femixer.training.distributed import start_worker

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in PRIORS),
    ("gla", {"decay": "channel"}),
    ("mamba", {"normalize": False}),
)
DTYPES = (torch.float32, torch.bfloat16)
# Channels of a key at dim 512; values have half of them or more.
HEAD_WIDTHS = (64, 32, 128)
# Operators whose tiles grow with the head. Programs of the others hold as many numbers whatever its width, so one width
# shows what they take.
GROWING = ("softmax", "softmax_step", "decayed_linear", "pair_state_space")
WITHOUT_HEADS = ("aft", "decay", "ssm", "mamba")  # priors of none of them
DIM, LENGTH = 512, 272
# Constants of kernels that are widths -> that of the tile which they share with others.
TILES = {"WIDTH": "COLUMNS", "width": "WIDTH", "key_width": "KEY_WIDTH"}


class Use(NamedTuple):
    """A layer in use: with what it is built, and whether padding is marked."""

    prior: str
    options: dict[str, Any]
    head_width: int
    dtype: torch.dtype
    causal: bool
    masked: bool


def uses(
    kinds: Sequence[tuple[str, dict[str, Any]]] = KINDS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    head_widths: Sequence[int] = HEAD_WIDTHS,
    modes: Sequence[tuple[bool, bool]] = ((True, False), (True, True), (False, False)),
) -> Iterator[Use]:
    """modes: causal or not, and with marks of padding or without."""
    for name, options in kinds:
        for width in head_widths[:1] if name in WITHOUT_HEADS else head_widths:
            for dtype in dtypes:
                for causal, masked in modes:
                    yield Use(name, options, width, dtype, causal, masked)


def launches(use: Use) -> list[Launch]:
    """Of a training step, and of decoding where the layer can."""
    layer = FreeEnergyMixer(
        DIM,
        DIM // use.head_width,
        use.prior,
        causal=use.causal,
        prior_options=use.options,
        device="meta",
        dtype=use.dtype,
    )
    x = torch.empty(2, LENGTH, DIM, device="meta", dtype=use.dtype, requires_grad=True)
    mask = torch.empty(2, LENGTH, device="meta", dtype=torch.bool) if use.masked else None
    with use_backend("triton"), recorded() as found:
        y = layer(x, mask=mask)
        assert isinstance(y, Tensor)
        y.backward(torch.empty_like(y))
        if use.causal:
            with torch.no_grad():
                _, state = layer(x, mask=mask, return_state=True)
                step = None if mask is None else mask[:, :1]
                layer(x[:, :1], mask=step, state=state, return_state=True)
    return found


def wanted(
    target: str, chosen: Sequence[Use], operators: Sequence[str] = (), advance: Callable[[], None] = lambda: None
) -> list[Source]:
    """What is to be compiled for a target, each source once; operators: only theirs, if any are named."""
    found: dict[Source, None] = {}
    with aimed_at(target):
        for use in chosen:
            for source in sources(launches(use)):
                if use.head_width == HEAD_WIDTHS[0] or source.operator in GROWING:
                    found[source] = None
            advance()
    forms: dict[Source, Source] = {}
    for source in found:
        if not operators or source.operator in operators:
            forms.setdefault(form_of(source), source)
    return list(forms.values())


def form_of(source: Source) -> Source:
    """What decides about the code of a kernel: of the widths that share a tile only whether they are multiples of 16,
    so that several numbers can be loaded at once."""
    tiles = {name for name, _ in source.constants}
    classed = ((name, value % 16 == 0 if TILES.get(name) in tiles else value) for name, value in source.constants)
    return source._replace(constants=tuple(classed))


class Result(NamedTuple):
    source: Source
    target: str
    usage: Usage | None
    problem: str | None


class Memory:
    """What was compiled before, in a file of lines: by the kernel's code, its form, the target and Triton's version."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[str, Usage]()
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                digest, registers, spills, shared, *_ = json.loads(line)
            except (ValueError, TypeError):
                if number == 1:  # others may be of runs that were stopped while they wrote
                    raise ValueError(f"known={str(path)!r} is not a file of compiled kernels") from None
            else:
                self.known[digest] = Usage(registers, spills, shared)

    def find(self, source: Source, target: str) -> Result | None:
        """What did not compile, or spilled, is tried again."""
        usage = self.known.get(_digest(source, target))
        return None if usage is None or usage.spills else Result(source, target, usage, usage.problem(target))

    def add(self, result: Result) -> None:
        if result.usage is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                where = result.target, result.source.label  # for people
                file.write(json.dumps([_digest(result.source, result.target), *result.usage, *where]) + "\n")


def _digest(source: Source, target: str) -> str:
    form = source.label, *source[2:]  # not the file that the kernel is in
    return hashlib.sha256(repr((form, target, version_of(source))).encode()).hexdigest()[:32]


def compile_all(
    pairs: Sequence[tuple[Source, str]],
    workers: int | None = None,
    advance: Callable[[], None] = lambda: None,
    memory: Memory | None = None,
) -> list[Result]:
    """Compile sources for targets, side by side in processes of their own (one worker: in this one)."""
    workers = os.cpu_count() or 1 if workers is None else workers
    found: dict[int, Result] = {}
    context = multiprocessing.get_context("spawn")

    def keep(i: int, result: Result) -> None:
        found[i] = result
        if memory is not None:
            memory.add(result)
        advance()

    with nullcontext() if workers == 1 else ProcessPoolExecutor(workers, context, start_worker) as pool:
        if pool is None:
            for i, pair in enumerate(pairs):
                keep(i, _compiled(*pair))
        else:
            waiting = {pool.submit(_compiled, *pair): i for i, pair in enumerate(pairs)}
            for future in as_completed(waiting):
                keep(waiting[future], future.result())
    return [found[i] for i in range(len(pairs))]


def _compiled(source: Source, target: str) -> Result:
    try:
        usage = compile_for(source, target)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Result(source, target, None, f"does not compile: {type(error).__name__}: {lines[-1]}")
    return Result(source, target, usage, usage.problem(target))


def summary(results: Sequence[Result], targets: Sequence[str]) -> Iterator[str]:
    """Per target: kernels, the most registers and shared memory and of which, those that spill."""
    yield "| target | kernels | most registers | most shared memory | spills |"
    yield "|---|---|---|---|---|"
    for target in targets:
        here = [(r.source.label, r.usage) for r in results if r.target == target and r.usage is not None]
        if here:
            registers = max(here, key=lambda each: each[1].registers)
            shared = max(here, key=lambda each: each[1].shared)
            cells = f"{registers[1].registers} ({registers[0]}) | {shared[1].shared / 1024:.0f} KB ({shared[0]})"
            yield f"| {target} | {len(here)} | {cells} | {sum(u.spills > 0 for _, u in here) or 'none'} |"


def table(results: Sequence[Result], targets: Sequence[str]) -> Iterator[str]:
    """Kernels x targets: the most registers and kilobytes of shared memory of any form of a kernel; then problems."""
    yield f"{'kernel (forms)':<40}" + "".join(f"{target:>14}" for target in targets)
    for label in sorted({result.source.label for result in results}):
        own = [result for result in results if result.source.label == label]
        cells = []
        for target in targets:
            here = [r.usage for r in own if r.target == target and r.usage is not None]
            spilled = " !" if any(r.problem for r in own if r.target == target) else ""
            most = (max(u.registers for u in here), max(u.shared for u in here)) if here else (0, 0)
            cells.append(f"{most[0]} r {most[1] / 1024:.0f} KB{spilled}" if here else f"-{spilled}")
        forms = len({result.source for result in own})
        yield f"{f'{label} ({forms})':<40}" + "".join(f"{cell:>14}" for cell in cells)
    for result in results:
        if result.problem is not None:
            yield f"wrong: {result.source.label} on {result.target}: {result.problem}; {_constants(result.source)}"


def _constants(source: Source) -> str:
    types = sorted({kind for _, kind in source.types if kind.startswith("*")})
    return ", ".join([*types, *(f"{name}={value}" for name, value in (*source.constants, *source.options))])
