"""What a call costs: seconds, bytes and FLOPs, measured so that a busy machine disturbs a comparison least."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from femixer.state import Growing

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


@contextmanager
def unlimited_compilation(compiling: bool) -> Iterator[None]:
    """torch.compile counts the versions of one forward() over all contestants, and after a few gives up."""
    if not compiling:
        yield
        return
    from torch._dynamo import config

    with config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield


def stopwatch(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that one call takes, until the device has finished it."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


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


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch holds at one time during the call, beyond what it held before.

    On a CPU it is exact and repeatable: the running sum of every allocation and release that torch's allocator reports,
    those inside custom operators and compiled code included. What a library takes for itself (the packing buffers of a
    matrix product, the scratch arrays of femixer's numba kernels) does not pass through that allocator.
    """
    if device.type == "cuda":
        gc.collect()
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's own library announces each start and stop on standard error, unless told otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with no_garbage_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    return highest_sum(_allocations(recorded))


def highest_sum(allocations: Iterable[tuple[int, int]]) -> int:
    """The most bytes live at one time, from (address, bytes) in order; negative bytes release the address.

    Releases of what was allocated before the record began do not count.
    """
    live: dict[int, int] = {}
    total = highest = 0
    for address, size in allocations:
        if size > 0:
            live[address] = size
            total += size
        else:
            total -= live.pop(address, 0)
        highest = max(highest, total)
    return highest


def _allocations(recorded: profile) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the CPU allocations and releases, in the order they happened."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    on_cpu = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    for event in sorted(on_cpu, key=lambda e: e["ts"]):
        yield event["args"]["Addr"], event["args"]["Bytes"]


def held_bytes(value: Any) -> int:
    """Bytes of the tensors in a streaming state; of a buffer with room to grow, what is filled."""
    if isinstance(value, Growing):
        value = value.tensor
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    return sum(held_bytes(item) for item in value) if isinstance(value, (tuple, list)) else 0


def flops(call: Callable[[], object]) -> int:
    """Multiplications and additions of the matrix products that a call performs, those of custom operators included.

    As is the custom, causal attention counts as if it looked at all pairs, and elementwise work does not count. A
    recurrence that runs as a compiled kernel is no matrix product of torch's and does not count either.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU)
    with counter, _InsideOperators():
        call()
    return counter.get_total_flops()


class _InsideOperators(TorchDispatchMode):
    """Lets the modes below see the operations inside femixer's own operators instead of one opaque operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        implementation = torch._C.DispatchKey.CompositeExplicitAutograd  # where torch.library.custom_op registers it
        if func.namespace != "femixer" or not func.has_kernel_for_dispatch_key(implementation):
            return func(*args, **kwargs)
        with self:
            return func._op_dk(implementation, *args, **kwargs)


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


# torch counts its fused attention on a GPU, not on a CPU.
_ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
