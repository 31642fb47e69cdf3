"""Several processes as one: who this one is, which part of the work is its own, and what all of them agree on.

`torchrun` starts the processes; without it there is one, and nothing here talks to anybody.
"""

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from femixer.optional import require
from femixer.options import check

Value = TypeVar("Value")

_control: Any = None
"""The processes connected through the CPU, whatever connects their devices: for decisions, not for tensors."""
_copies = 1
"""Processes that have the same part of a batch."""


@dataclass(frozen=True)
class Part:
    """The slice number `index` of `count` slices of a global batch."""

    index: int = 0
    count: int = 1

    def rows(self, total: int) -> slice:
        """The rows of this part, of `total`: contiguous, in order, and as many as any other part's, or one more."""
        check(
            total >= self.count, "batch", total, f"at least one row for each of {self.count} (processes x accumulate)"
        )
        return slice(total * self.index // self.count, total * (self.index + 1) // self.count)


def start(device: str = "auto") -> torch.device:
    """Connect to the other processes if torchrun started this one, and return the device this process works on.

    Only the first call decides.
    """
    global _control
    cpu = device == "cpu" or not torch.cuda.is_available()
    state = require("accelerate", "cli").PartialState(cpu=cpu)
    if _control is None and distributed.is_initialized():
        backend = distributed.get_backend()
        _control = distributed.group.WORLD if backend == "gloo" else distributed.new_group(backend="gloo")
        atexit.register(stop)
    return state.device


def stop() -> None:
    """Leave the other processes, which the end of the program does by itself."""
    global _control
    _control = None
    if distributed.is_initialized():
        distributed.destroy_process_group()


def rank() -> int:
    return int(distributed.get_rank(_control)) if _control else 0


def world() -> int:
    return int(distributed.get_world_size(_control)) if _control else 1


def is_main() -> bool:
    """Is this the process that writes and prints?"""
    return rank() == 0


def share_parts(copies: int) -> None:
    """From now on so many processes in a row have the same part of a batch: they divide the model or the sequences."""
    global _copies
    _copies = copies


def part() -> Part:
    """This process's share of work that all of them divide, such as an evaluation."""
    return Part(rank() // _copies, world() // _copies)


def own_parts(pieces: int) -> list[Part]:
    """Those of a global batch that are this process's, where each process makes so many pieces of its share."""
    own = part()
    return [Part(own.index * pieces + number, own.count * pieces) for number in range(pieces)]


def total(*values: float) -> list[float]:
    """The sum of each value over all parts, in float64, the same in every process. Processes with the same part have
    the same values."""
    if world() == 1:
        return [*values]
    sums = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(sums, group=_control)
    return (sums / _copies).tolist()


def gather(value: Value) -> list[Value]:
    """What every process holds, in the order of their ranks."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    distributed.all_gather_object(values, value, group=_control)
    return values


def on_main(action: Callable[[], Value]) -> Value:
    """Run `action` in the main process alone. Every process returns what it returned, or raises what it raised."""
    if world() == 1:
        return action()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    distributed.broadcast_object_list(outcome, group=_control)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def control_group() -> Any:
    """The processes connected through the CPU; None if there is one."""
    return _control
