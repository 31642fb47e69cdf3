"""`femixer doctor`: what runs here, on which backend and why, and whether it computes what it should."""

import math
import os
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer import reporting
from femixer.kernels import check, dispatch
from femixer.kernels.operator import Operator
from femixer.options import check as check_option
from femixer.options import parse
from femixer.training.journal import counting

PACKAGES = ("femixer.kernels", "femixer.baselines.kernels")
VERSIONS = ("torch", "numpy", "numba", "triton", "transformers", "femixer")
FLOATS = (torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """Versions, threads and devices; which backend runs each operator and why not another; and a check of every
    operator on every backend against its definition in float64, results and gradients.

    The exit code is 0 if all agree and 1 if one does not.
    """

    warm: bool = False
    """Compile all kernels first. They are kept on disk; without this, each is compiled when it is first used."""
    operators: tuple[str, ...] = ()
    """Check only these operators (default: all)."""
    compile: bool = False
    """Compile the Triton kernels of all layers ahead of time instead; needs no GPU. Shows registers, spills and memory.
    What was compiled before is not compiled again, so a run that was stopped goes on.
    The exit code is 1 if a kernel spills or takes too much shared memory."""
    targets: tuple[str, ...] = ()
    """With --compile: for these GPUs only, e.g. sm_90 or gfx942."""
    known: Path | None = None
    """With --compile: the file that keeps what was compiled (default: one beside Triton's cache)."""


class Column(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.device})"


class Case(NamedTuple):
    """An example of an operator in one float type, on the device of a column."""

    operator: Operator
    column: Column
    name: str
    dtype: torch.dtype
    arguments: tuple[Any, ...]
    refusal: str | None = None
    """Why the backend does not serve it."""

    def __str__(self) -> str:
        return f"{self.operator.name} on {self.column}, example {self.name!r}, {_short(self.dtype)}"


def main(args: Sequence[str]) -> int:
    options = parse(Options, args, "doctor")
    operators = check.find_operators(*PACKAGES)
    names = [operator.name for operator in operators]
    for name in options.operators:
        check_option(name in names, "operators", name, f"one of {', '.join(names)}")
    for name, given in (("targets", options.targets), ("known", options.known)):
        check_option(options.compile or not given, name, given, "--compile with it")
    check_option(not (options.compile and options.warm), "warm", True, "either --warm or --compile")
    chosen = [operator for operator in operators if operator.name in (options.operators or names)]
    dispatch.check(dispatch.asked(), dispatch.VARIABLE)
    for line in surroundings():
        print(line)
    if options.compile:
        return compile_kernels(options)
    if options.warm:
        print(warm(chosen, layers=not options.operators))
    show_backends(chosen)
    start = time.perf_counter()
    cases = served(chosen)
    wrong = examine(cases)
    for text in wrong:
        print(text)
    if (table := half_precision(cases)) is not None:
        reporting.show(table)
    seconds = time.perf_counter() - start
    count = f"{len(cases)} checks of {len(chosen)} operator{'s' * (len(chosen) > 1)} in {seconds:.1f} s"
    print(f"{len(wrong)} of {count} failed" if wrong else f"All right: {count}")
    return 1 if wrong else 0


def surroundings() -> Iterator[str]:
    versions = [f"python {platform.python_version()}"]
    for name in VERSIONS:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    yield f"versions   {', '.join(versions)}"
    threads, kernels = torch.get_num_threads(), "none"
    if dispatch.unavailable("numba") is None:
        from femixer.kernels import numba_kernel

        kernels = str(min(threads, numba_kernel.MOST_THREADS) if numba_kernel._parallel else 1)
    yield f"threads    {threads} of torch, {kernels} of compiled kernels, {os.cpu_count()} processors"
    names = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    names += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    yield f"devices    {', '.join(names)}"
    source = f"{dispatch.VARIABLE} is {'set' if os.environ.get(dispatch.VARIABLE) else 'not set'}"
    yield f"backend    {dispatch.asked()} ({source})"


def columns() -> list[Column]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [Column(backend, device) for device in devices for backend in dispatch.DEVICES[device]]


def served(operators: Sequence[Operator]) -> list[Case]:
    """Every example that a backend serves, in every float type."""
    return [case for case in every_case(operators) if case.refusal is None]


def every_case(operators: Sequence[Operator]) -> Iterator[Case]:
    for operator in operators:
        examples = check.page(operator).examples()
        for column in columns():
            for name, arguments in examples.items():
                narrow = any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in arguments)
                for dtype in FLOATS if narrow else FLOATS[:1]:  # nothing to cast: once is enough
                    given = check.cast(arguments, dtype, column.device)
                    why = dispatch.refusal(operator, column.backend, given)
                    yield Case(operator, column, name, dtype, given, why)


def examine(cases: Sequence[Case]) -> list[str]:
    """What is wrong, in one line each."""
    wrong: list[str] = []
    with counting(len(cases), "checks") as told:
        for case in cases:
            allowed = check.tolerance(case.operator, case.dtype)
            try:
                errors = check.compare(case.operator, case.column.backend, case.arguments, case.dtype)
                found = [("results", errors.results, allowed.results)]
                found += [(f"gradient of {name}", e, allowed.gradients) for name, e in errors.gradients.items()]
                if case.column.backend == "triton":
                    wrong += _unrepeated(case)
                # Written as `not <=` so that NaN is wrong.
                wrong += [
                    f"wrong: {case}: {what} off by {e:.1e}, allowed {a:.0e}" for what, e, a in found if not e <= a
                ]
            except Exception as problem:
                wrong.append(f"wrong: {case}: {type(problem).__name__}: {problem}")
            told(1)
    return wrong


def _unrepeated(case: Case) -> Iterator[str]:
    """What races between threads and memory that nobody wrote do to a case: only a GPU shows them."""
    # Under deterministic algorithms torch fills new memory with NaN.
    asked, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            first, second = (check.compare(case.operator, "triton", case.arguments, case.dtype) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=warned)
    if first != second:
        yield f"wrong: {case}: differs from run to run with deterministic algorithms"
    if not math.isfinite(first.worst):
        yield f"wrong: {case}: not a number where new memory is"


def half_precision(cases: Sequence[Case]) -> reporting.Table | None:
    """The largest errors of Triton's kernels in half precision beside plain torch's. They are told, not judged: nobody
    knows those of bfloat16 before a GPU has shown them. None without a GPU."""
    worst: dict[str, list[float | None]] = {}
    for case in cases:
        if case.column.backend == "triton" and case.dtype == torch.float32:
            found = [_half_error(case, dtype, backend) for dtype in HALF for backend in ("triton", "plain")]
            before = worst.setdefault(case.operator.name, [None] * len(found))
            pairs = zip(before, found, strict=True)
            worst[case.operator.name] = [max((x for x in pair if x is not None), default=None) for pair in pairs]
    titles = ["operator", *(f"{_short(dtype)}, {backend}" for dtype in HALF for backend in ("triton", "plain"))]
    rows = [[name, *("" if x is None else f"{x:.1e}" for x in errors)] for name, errors in worst.items()]
    columns = [reporting.Column(title) for title in titles]
    return reporting.Table.of(columns, rows, "Largest errors in half precision") if rows else None


def _half_error(case: Case, dtype: torch.dtype, backend: str) -> float | None:
    """None if Triton does not serve the case in this type, infinite if it cannot be carried out."""
    given = check.cast(case.arguments, dtype, case.column.device)
    if dispatch.refusal(case.operator, "triton", given) is not None:
        return None
    try:
        return check.compare(case.operator, backend, given, dtype).worst
    except Exception:
        return math.inf


def show_backends(operators: Sequence[Operator]) -> None:
    """Operators x backends, and below it why a backend is not used."""
    shown = columns()
    serves: dict[tuple[str, Column], list[bool]] = {}
    used: set[tuple[str, Column]] = set()
    reasons: dict[str, list[str]] = {}
    for operator, column, _, _, arguments, why in every_case(operators):
        serves.setdefault((operator.name, column), []).append(why is None)
        with suppress(dispatch.BackendError):  # another one was asked for than serves
            if dispatch.choose(operator, arguments) is operator.implementations.get(column.backend):
                used.add((operator.name, column))
        if why is not None and dispatch.unavailable(column.backend) is None:
            found = reasons.setdefault(f"{column.backend}, {operator.name}", [])
            found += [why] if why not in found else []

    def cell(operator: Operator, column: Column) -> str:
        if dispatch.unavailable(column.backend) is None and operator.implementation(column.backend) is None:
            return "left to torch"
        all_ = serves[operator.name, column]
        if not any(all_):
            return "no"
        part = "" if all(all_) else f" for {sum(all_)} of {len(all_)}"
        return f"{'used' if (operator.name, column) in used else 'ready'}{part}"

    rows = [[operator.name, *(cell(operator, column) for column in shown)] for operator in operators]
    titles = [reporting.Column(title) for title in ("operator", *map(str, shown))]
    reporting.show(reporting.Table.of(titles, rows, "Backends by operator, on its examples"))
    for name in dispatch.FILES:
        if (why := dispatch.unavailable(name)) is not None:
            reasons[name] = [why]
    if "triton" not in reasons and not torch.cuda.is_available():
        reasons["triton"] = ["torch sees no GPU here"]
    for where, (first, *others) in sorted(reasons.items()):
        more = f" (and {len(others)} more of this kind)" if others else ""
        print(f"- {where}: {first}{more}")


def warm(operators: Sequence[Operator], layers: bool) -> str:
    """Compile every kernel, for one thread and for several; layers: also as the layers call them."""
    if (why := dispatch.unavailable("numba")) is not None:
        return f"Nothing to compile: {why}"
    from femixer.kernels import numba_kernel

    numba_kernel.silence()
    print("Compiling all kernels; where none are on disk this takes minutes", flush=True)
    start = time.perf_counter()
    examine([case for case in served(operators) if case.column.backend == "numba"])
    if layers:
        run_layers()
    pairs = [(parallel, signature) for serial, parallel in numba_kernel.KERNELS for signature in serial.signatures]
    with counting(len(pairs), "kernels compiled") as told:
        for parallel, signature in pairs:
            parallel.compile(signature)
            told(1)
    return f"{len(pairs)} kernels are compiled and on disk ({time.perf_counter() - start:.0f} s)"


def compile_kernels(options: Options) -> int:
    """Every Triton kernel that layers launch, for GPUs that need not be here; 1 if one is not as it should be."""
    why = dispatch.unavailable("triton")
    if why is None and dispatch.is_interpreted():
        why = "TRITON_INTERPRET=1 is set, and what is interpreted is not compiled"
    if why is not None:
        raise dispatch.BackendError(f"compile=True cannot be done: {why}")
    from femixer import gpu_compile
    from femixer.kernels.triton_compile import TARGETS, memory_path

    for target in options.targets:
        check_option(target in TARGETS, "targets", target, f"one of {', '.join(TARGETS)}")
    targets = options.targets or TARGETS
    memory = gpu_compile.Memory(options.known or memory_path())
    uses = list(gpu_compile.uses())
    with counting(len(targets) * len(uses), "layers looked at for their kernels") as told:
        pairs = [
            (source, target)
            for target in targets
            for source in gpu_compile.wanted(target, uses, options.operators, lambda: told(1))
        ]
    known = [result for pair in pairs if (result := memory.find(*pair)) is not None]
    done = {(result.source, result.target) for result in known}
    left = [pair for pair in pairs if pair not in done]
    print(f"{len(pairs)} kernels, {len(known)} of them compiled before ({memory.path})", flush=True)
    start = time.perf_counter()
    with counting(len(left), "kernels compiled") as told:
        results = known + gpu_compile.compile_all(left, advance=lambda: told(1), memory=memory)
    for line in (*gpu_compile.table(results, targets), "", *gpu_compile.summary(results, targets)):
        print(line)
    wrong = sum(result.problem is not None for result in results)
    print(f"{wrong} of {len(results)} are wrong ({time.perf_counter() - start:.0f} s)")
    return 1 if wrong else 0


def run_layers() -> None:
    """Small layers of every prior in every use: training and reading, at once and token by token, causal and not."""
    from femixer import FreeEnergyMixer
    from femixer.priors import PRIORS

    kinds: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in PRIORS]
    kinds += [("gla", {"decay": "channel"}), ("mamba", {"normalize": False}), ("softmax", {"cache": "exp"})]
    # Longer sequences than a few tokens may have kernels of their own.
    uses = [*product(kinds, ("CLTG", "LTG", ""), (True, False), (5, 300))]
    with counting(len(uses), "layers run") as told:
        for (name, options), parts, causal, length in uses:
            mixer = FreeEnergyMixer(32, 2, prior=name, parts=parts, causal=causal, prior_options=options)
            x = torch.randn(2, length, 32)
            keep = torch.arange(length) >= torch.tensor([[0], [2]])
            for mask in (None, keep):
                mixer(x.requires_grad_(), mask=mask).sum().backward()
                with torch.no_grad():
                    mixer(x, mask=mask)
                    if causal:
                        _, state = mixer(x, mask=mask, return_state=True)
                        for _ in range(2):
                            _, state = mixer(x[:, :1], state=state, return_state=True)
            told(1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
