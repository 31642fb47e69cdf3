"""Several processes as one: who this one is, which part of the work is its own, and what all of them agree on.
`torchrun` starts them; without it there is one, and nothing here talks to anybody. Besides: Ctrl-C and SIGTERM as
requests between two steps, and work in other processes, side by side.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import distributed

from femixer.optional import quiet, require
from femixer.options import check

Value = TypeVar("Value")
Item = TypeVar("Item")
Result = TypeVar("Result")

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


def say(text: str) -> None:
    """A line on standard error, of the main process: what is on standard output is the result of a command."""
    if is_main():
        print(text, file=sys.stderr, flush=True)


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


class Interrupted(KeyboardInterrupt):
    """What runs was asked to stop, and has done so where --resume goes on; the message says how far it came."""


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, and nothing else, while this context is active.

    A second signal is not held back: the handlers that were there before answer it.
    """
    requested, before = threading.Event(), dict[signal.Signals, Any]()

    def restore() -> None:
        for number, handler in [*before.items()]:
            signal.signal(number, handler)
        before.clear()

    def request(number: int, frame: FrameType | None) -> None:
        restore()  # first: a signal inside of `set` would wait for the lock that this thread holds
        requested.set()

    if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
        before.update({number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)})
    try:
        yield requested
    finally:
        restore()


def carried_out(
    work: Callable[[Item], Result], tasks: Sequence[Item], jobs: int
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """`work(task)` for each task in `jobs` processes, which live as long as there are tasks: the finished ones.

    A future holds the result, or what the work raised; `BrokenProcessPool` if its process died, which costs no other
    task. Whoever stops listening ends the processes with SIGTERM: training saves its step then, and stops.
    """
    waiting = [*reversed(tasks)]
    idle = [one_worker() for _ in range(min(jobs, len(tasks)))]
    running: dict[Future[Result], tuple[Item, ProcessPoolExecutor]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                pool, task = idle.pop(), waiting.pop()
                with interrupts_held():  # submitting starts the worker; Ctrl-C is for this process to pass on
                    running[pool.submit(work, task)] = task, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, pool = running.pop(future)
                broken = isinstance(future.exception(), BrokenProcessPool)
                idle.append(one_worker() if broken else pool)
                yield task, future
    finally:
        for process in multiprocessing.active_children() if running else ():
            process.terminate()
        for pool in [*idle, *(pool for _, pool in running.values())]:
            pool.shutdown(cancel_futures=True)


def one_worker() -> ProcessPoolExecutor:
    # Not forked: threads and compiled kernels do not survive that.
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start_worker)


def start_worker() -> None:
    quiet()
    threading.Thread(target=die_with_parent, daemon=True).start()


def die_with_parent() -> None:
    """Without this a worker would go on when its parent is killed, and get in the way of the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until this ends. Processes started meanwhile never get it; it is for their parent to stop them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
