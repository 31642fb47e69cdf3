"""Where a benchmark runs and how often, and seconds of a call, taken in rounds so that a busy machine disturbs a
comparison least; and a machine that is busy."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from femixer.options import check, check_positive, check_threads
from femixer.reporting import progress
from femixer.state import SPARE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class MeasureOptions:
    """Device, number of rounds and folder of the results."""

    batch: int = 2
    """Sequences."""
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
        check_positive(batch=self.batch, rounds=self.rounds)
        check(self.warmup >= 0, "warmup", self.warmup, "a whole number of at least 0")
        check_threads(self.threads)
        check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        usable = self.device == "cpu" or (self.device == "cuda" and torch.cuda.is_available())
        check(usable, "device", self.device, "cpu, or cuda where torch finds one")
        check(not self.out.exists() or self.out.is_dir(), "out", str(self.out), "a folder")


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    """Options of benchmarks with targets."""

    targets: bool = False
    """Show the project's target beside each ratio that was measured at the size the target is meant for."""


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


def check_distinct(name: str, given: Sequence[object]) -> None:
    check(len(set(given)) == len(given) > 0, name, given, "one or more, each once")


Key = TypeVar("Key", bound=Hashable)


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


def timed(what: str, samples: Mapping[Key, Callable[[], float]], options: MeasureOptions) -> dict[Key, list[float]]:
    """The race with the rounds of the options, and a progress bar that says what it is about."""
    with progress(what, options.warmup + options.rounds) as advance:
        return race(samples, options.rounds, options.warmup, advance)


def race(
    samples: Mapping[Key, Callable[[], float]],
    rounds: int,
    warmup: int,
    finished: Callable[[], None] = lambda: None,
) -> dict[Key, list[float]]:
    """Seconds of every contestant in every round, after `warmup` rounds that do not count.

    A round is one sample of each contestant, in an order shuffled anew: noise that lasts longer than a call hits all
    alike, and nobody always runs after the same neighbour. Garbage is collected between rounds only.
    `finished` is called after each round.
    """
    order, shuffle = list(samples), random.Random(0).shuffle
    seconds: dict[Key, list[float]] = {name: [] for name in samples}
    with no_garbage_collection():
        for number in range(warmup + rounds):
            shuffle(order)
            for name in order:
                sample = samples[name]()
                if number >= warmup:
                    seconds[name].append(sample)
            gc.collect()
            finished()
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


@contextmanager
def unlimited_compilation(compiling: bool) -> Iterator[None]:
    """torch.compile counts the versions of one forward() over all contestants, and after a few gives up."""
    if not compiling:
        yield
        return
    from torch._dynamo import config

    with config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield


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
