"""Bytes: the most that a call holds at one time, and those of a streaming state."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from femixer.bench.measure import no_garbage_collection, synchronize
from femixer.state import Growing


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch holds at one time during the call, beyond what it held before.

    On a CPU it is exact and repeatable: the running sum of every allocation and release that torch's allocator reports,
    those inside custom operators and compiled code included. What a library takes for itself (the packing buffers of a
    matrix product, the scratch arrays of femixer's numba kernels) does not pass through that allocator.
    """
    if device.type == "cuda":
        gc.collect()
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
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
