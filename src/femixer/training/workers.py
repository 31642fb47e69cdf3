"""Work in other processes of this machine, side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def carried_out(
    work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int
) -> Generator[tuple[Task, Future[Result]], None, None]:
    """`work(task)` for each task in `jobs` processes, which live as long as there are tasks: the finished ones.

    A future holds the result, or what the work raised; `BrokenProcessPool` if its process died, which costs no other
    task. Whoever stops listening ends the processes with SIGTERM: training saves its step then, and stops.
    """
    waiting = [*reversed(tasks)]
    idle = [one_worker() for _ in range(min(jobs, len(tasks)))]
    running: dict[Future[Result], tuple[Task, ProcessPoolExecutor]] = {}
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
