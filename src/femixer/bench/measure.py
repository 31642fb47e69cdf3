"""What all benchmarks share, from the command line to a JSON file and its tables: where one runs and how often; seconds
of a call, taken in rounds so that a busy machine disturbs a comparison least; a machine that is busy; the report."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from femixer import __version__
from femixer.options import Count, Whole, check, check_options, check_threads, parse
from femixer.reporting import Table, show, write
from femixer.state import SPARE
from femixer.training import atomic
from femixer.training.journal import counting

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class MeasureOptions:
    """Device, number of rounds and folder of the results."""

    batch: Count = 2
    """Sequences."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number format of weights and tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    threads: int | None = None
    """CPU threads (default: torch's choice)."""
    rounds: Count = 20
    """Rounds measured; a round is one sample of every contestant."""
    warmup: Whole = 3
    """Rounds before that, not counted."""
    seed: int = 0
    """Seed of weights and tokens."""
    out: Path = Path("results/bench")
    """Folder for the results."""

    @property
    def tensors(self) -> dict[str, Any]:
        """Device and number format, as the arguments of whatever makes a tensor or a layer."""
        return {"device": self.device, "dtype": DTYPES[self.dtype]}

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "targets")}

    def validate(self) -> None:
        """Raise a ValueError that names the first value that makes no sense; the layers check their own."""
        check_options(self)
        check_threads(self.threads)
        usable = self.device == "cpu" or (self.device == "cuda" and torch.cuda.is_available())
        check(usable, "device", self.device, "cpu, or cuda where torch finds one")
        check(not self.out.exists() or self.out.is_dir(), "out", str(self.out), "a folder")


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    """Options of benchmarks with targets."""

    targets: bool = False
    """Show the project's target beside each ratio that was measured at the size the target is meant for."""

    @property
    def versions(self) -> dict[str, str]:
        """Of other packages that decide the numbers."""
        return {}


@dataclass(frozen=True)
class MixerOptions(BenchOptions):
    """The options of mixers, with the defaults of the reference setting for softmax."""

    dim: int = 768
    """Width of the tokens."""
    heads: int = 12
    """Heads; divides dim."""
    kv_heads: int | None = None
    """Key/value heads; divides heads (default: as many as heads)."""
    decode_steps: int = 16
    """Tokens decoded per sample, from the same state each time."""

    def validate(self) -> None:
        super().validate()
        check(0 < self.decode_steps <= SPARE, "decode_steps", self.decode_steps, f"a whole number from 1 to {SPARE}")


Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Spread:
    """The median of several measurements and the quartiles around it."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75])
        return cls(float(median), float(q1), float(q3))


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Spread:
    """The spread of times[r] / reference[r] over the rounds r: what slows a whole round down cancels."""
    return Spread.of([a / b for a, b in zip(times, reference, strict=True)])


@dataclass(frozen=True)
class Timing:
    """Seconds of a call, one sample per round, and the ratio to the rival's call of the same round."""

    seconds: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, seconds: Sequence[float], reference: Sequence[float]) -> Timing:
        return cls(Spread.of(seconds), paired_ratio(seconds, reference), seconds)


def stopwatch(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that one call takes, until the device has finished it."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def told(items: Collection[Item], what: str) -> Iterator[Item]:
    """The items one by one, with a progress bar that says what they are."""
    with counting(len(items), what) as done:
        for item in items:
            yield item
            done(1)


def timed(what: str, samples: Mapping[Key, Callable[[], float]], options: MeasureOptions) -> dict[Key, list[float]]:
    """The race with the rounds of the options; what: it is about, for its progress bar."""
    return race(samples, options.rounds, options.warmup, f"rounds of {what}")


def race(
    samples: Mapping[Key, Callable[[], float]], rounds: int, warmup: int, what: str = "rounds"
) -> dict[Key, list[float]]:
    """Seconds of every contestant in every round, after `warmup` rounds that do not count.

    A round is one sample of each contestant, in an order shuffled anew: noise that lasts longer than a call hits all
    alike, and nobody always runs after the same neighbour. Garbage is collected between rounds only.
    """
    order, shuffle = list(samples), random.Random(0).shuffle
    seconds: dict[Key, list[float]] = {name: [] for name in samples}
    with no_garbage_collection():
        for number in told(range(warmup + rounds), what):
            shuffle(order)
            for name in order:
                sample = samples[name]()
                if number >= warmup:
                    seconds[name].append(sample)
            gc.collect()
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No automatic collection inside; one called for there looks only at what is newer, which takes no time."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def cpu_threads(count: int | None) -> Iterator[int]:
    """Run with this many CPU threads (None: as it is); gives the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def unlimited_compilation(compiling: bool) -> AbstractContextManager[object]:
    """torch.compile counts the versions of one forward() over all contestants, and after a few gives up."""
    if not compiling:
        return nullcontext()
    from torch._dynamo import config

    return config.patch(recompile_limit=1000, accumulated_recompile_limit=1000)


# Products of matrices on one thread, until standard input closes: that happens also when the parent is killed.
_WORK = """
import os, sys, threading
import numpy

def end():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=end, daemon=True).start()
a = numpy.full((512, 512), 1e-3, dtype=numpy.float32)
a @ a
print("ready", flush=True)
while True:
    a @ a
"""
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "VECLIB_MAXIMUM")}


@contextmanager
def busy(count: int) -> Iterator[list[int]]:
    """Keep `count` processes computing meanwhile; gives their ids."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            # In a session of its own: Ctrl-C reaches the measurement alone, which then ends them.
            process = subprocess.Popen(
                [sys.executable, "-c", _WORK],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )
            processes.append(process)
        for process in processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError(f"a process that was to keep the machine busy ended with code {process.wait()}")
        yield [process.pid for process in processes]
        ended = [process.returncode for process in processes if process.poll() is not None]
        if ended:
            raise RuntimeError(f"{len(ended)} of {count} processes beside the measurement ended early, codes {ended}")
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


AnyOptions = TypeVar("AnyOptions", bound=MeasureOptions)
AnyReport = TypeVar("AnyReport", bound="Report")
Tables = Callable[[AnyReport, bool], Iterable[Table]]
"""The tables of a report, with targets or without."""


@dataclass(frozen=True)
class Report:
    """What BENCHMARK.json holds; a benchmark adds its lists of results."""

    settings: dict[str, Any]
    environment: dict[str, Any]

    @property
    def heads(self) -> str:
        """For titles."""
        own, shared = self.settings["heads"], self.settings["kv_heads"]
        return f"{own} heads" + ("" if shared is None else f" ({shared} for keys and values)")

    def place(self, *words: str) -> str:
        """Where and how it was measured, for titles."""
        made, threads = self.environment, self.environment["threads"]
        where = (f"{threads} thread{'s' * (threads > 1)}", f"torch {made['torch']}")
        return ", ".join([self.settings["dtype"], *words, *where])

    def save(self, path: Path) -> None:
        """The file has the benchmark's name, and may have more behind a hyphen or a full stop."""
        benchmark = re.split("[-.]", path.name)[0]
        atomic.write(path, json.dumps({"benchmark": benchmark, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls: type[AnyReport], path: Path) -> AnyReport:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.pop("benchmark", None)
        return _made(cls, content)


def _made(kind: Any, value: Any) -> Any:
    """A value of JSON as the dataclasses, or lists of them, that `kind` describes."""
    if is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: _made(kinds[name], each) for name, each in value.items()})  # type: ignore[operator]
    if isinstance(kind, types.UnionType):
        return value if value is None else _made(typing.get_args(kind)[0], value)
    if typing.get_origin(kind) is list:
        return [_made(typing.get_args(kind)[0], each) for each in value]
    return value


def environment(threads: int, device: str) -> dict[str, Any]:
    """What a time depends on besides the options."""
    return {
        "femixer": __version__,
        "torch": torch.__version__,
        "numba": next((found.version for found in distributions(name="numba")), None),  # without importing it
        "python": platform.python_version(),
        "threads": threads,
        "instructions": torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name(),
    }


@contextmanager
def resumed(
    kind: type[AnyReport], path: Path, options: MeasureOptions, overwrite: bool
) -> Iterator[tuple[AnyReport, Callable[[], None]]]:
    """The report of a file, or an empty one, to whose lists results are added, and the function that saves it then: the
    same command goes on from there. With --overwrite another file, which replaces `path` when all is measured."""
    new = path.with_suffix(".new.json")
    if overwrite:
        atomic.remove(new)
    file = new if new.exists() or (overwrite and path.exists()) else path
    with cpu_threads(options.threads) as threads:
        lists: Any = {each.name: [] for each in fields(kind) if each.name not in ("settings", "environment")}
        report = held(kind, file, kind(options.settings, environment(threads, options.device), **lists))
        yield report, lambda: report.save(file)
    report.save(path)
    if file != path:
        file.unlink()


def held(kind: type[AnyReport], path: Path, new: AnyReport) -> AnyReport:
    """What the file holds, to go on with; `new`, which holds no results, where there is none. An error where the file
    was made with other settings or in another environment than `new`."""
    if not path.exists():
        return new
    folder, advice = str(path.parent), "--overwrite starts anew, or choose another --out"
    try:
        report = kind.read(path)
        was = {**report.settings, **report.environment}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"out={folder!r} holds a {path.name} that cannot be read; {advice}") from None
    now = {**new.settings, **new.environment}
    differing = (name for name in {**was, **now} if was.get(name) != now.get(name))
    if reasons := ", ".join(f"{name} was {was.get(name)!r} and is now {now.get(name)!r}" for name in differing):
        raise ValueError(f"out={folder!r} holds points measured otherwise: {reasons}; {advice}")
    return report


@dataclass(frozen=True)
class Benchmark:
    """One that is measured at once: its options, what they measure, and the tables of its report."""

    name: str
    options: type[BenchOptions]
    measure: Callable[[Any], Mapping[str, Sequence[Any]]]
    """Options -> the report's lists of results by name."""
    report: type[Report]
    tables: Tables[Any]

    def run(self, options: Any) -> Any:
        """Measure, and write NAME.json and NAME.md."""
        options.validate()
        options.out.mkdir(parents=True, exist_ok=True)  # an unwritable place shows now, not after the measurement
        with cpu_threads(options.threads) as threads:
            torch.manual_seed(options.seed)
            results = self.measure(options)
        report = self.report(options.settings, {**environment(threads, options.device), **options.versions}, **results)
        report.save(options.out / f"{self.name}.json")
        write(options.out, [*self.tables(report, options.targets)], self.name, ("md",))
        return report

    def main(self, args: Sequence[str]) -> int:
        """`femixer bench NAME ...`"""
        return command(parse(self.options, args, f"bench {self.name}"), self.run, self.tables)


def command(options: AnyOptions, run: Callable[[AnyOptions], Report], tables: Callable[..., Iterable[Table]]) -> int:
    """`femixer bench ...`: run, show the tables."""
    try:
        report = run(options)
    except KeyboardInterrupt:
        if not hasattr(options, "overwrite"):  # nothing of it is kept
            raise
        told = "keeps what is finished, and the same command without --overwrite goes on from there"
        print(f"interrupted; {options.out}/ {told}", file=sys.stderr)
        return 130
    show(*tables(report, *([options.targets] if isinstance(options, BenchOptions) else [])))
    print(f"Results are in {options.out}/")
    return 0


def ratio_cell(ratio: Spread | float, target: float | None = None, at_least: bool = False) -> str:
    """A ratio, with its quartiles where it has them, and beside a target whether it is kept."""
    value = ratio.median if isinstance(ratio, Spread) else ratio
    text = f"{value:.3f}" + (f" [{ratio.q1:.3f}–{ratio.q3:.3f}]" if isinstance(ratio, Spread) else "")
    if target is None:
        return text
    sign = ("≥" if value >= target else "<") if at_least else ("≤" if value <= target else ">")
    return f"{text} {sign} {target:.2f}"


def bytes_cell(count: float | None) -> str:
    """None: of a state that does not grow with the context."""
    return "constant" if count is None else f"{count:,.0f}"


def fits(settings: Mapping[str, Any], size: Mapping[str, Any]) -> bool:
    """Whether a measurement has the size that a target is meant for."""
    return all(settings[name] == value for name, value in size.items())
