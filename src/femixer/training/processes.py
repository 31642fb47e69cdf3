"""Processes: Ctrl-C and SIGTERM as requests between two steps, and work in other processes, side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TypeVar


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and has saved a checkpoint after `step` steps, unless the run keeps none."""

    def __init__(self, step: int, steps: int, saved: bool = True) -> None:
        super().__init__(f"stopped after step {step} of {steps}, which is {'' if saved else 'not '}saved")


class StopRequest:
    """While this context is active, SIGINT and SIGTERM only set `requested`.

    A second signal is not held back: the handlers that were there before answer it.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._request) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}


Item = TypeVar("Item")
Result = TypeVar("Result")


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
