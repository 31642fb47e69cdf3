"""A busy machine: other processes that compute beside a measurement, as data loaders and neighbours do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
