"""Processes of the tests, forked from one that has imported what commands need: seconds less each than an interpreter.

For what processes do to files, locks and signals. What they do to kernels and parameters is tested as users run it, in
new interpreters and with torchrun: test_ownership.py, test_saved_states.py, test_lm_training.py,
test_parallel_training.py; `python -m femixer` itself in test_cli.py.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from femixer.cli import main
from femixer.kernels import dispatch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("accelerate", "femixer.tasks.lm.fit", "femixer.tasks.mad.fit", "femixer.tasks.vision.fit", "numba", "peft"),
        *("matplotlib.pyplot", "rich.progress", "safetensors.torch", "torch.distributed.fsdp", "tyro"),
    ]
)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Started:
    """`action(*args)` in a process of its own; what it returns, if that is a number, is the exit code."""

    def __init__(self, action: Callable[..., Any], *args: Any, **variables: str) -> None:
        self.files = tempfile.TemporaryDirectory()
        for name in ("out", "err"):
            Path(self.files.name, name).touch()
        environment = {**os.environ, **variables}
        self.process = SERVER.Process(target=carry_out, args=(self.files.name, environment, action, args))
        self.process.start()
        self.pid = self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def end(self, timeout: float = 300) -> Ended:
        """Wait for it; beyond `timeout` seconds it is killed."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        said = [Path(self.files.name, name).read_text(encoding="utf-8") for name in ("out", "err")]
        self.files.cleanup()
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, *said)

    def kill(self) -> Ended:
        self.send(signal.SIGKILL)
        return self.end()


def carry_out(files: str, environment: dict[str, str], action: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    os.environ.clear()
    os.environ.update(environment)
    # As in a new interpreter: the process that this one is forked from has run no kernel, so no thread is lost.
    dispatch._numba, dispatch.ENVIRONMENT = None, os.environ.get(dispatch.VARIABLE) or "auto"
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(files, name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    code = action(*args)
    if isinstance(code, int):
        sys.exit(code)


def python(*args: object, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter with these arguments, and to its end; variables: of its environment besides ours."""
    words, environment = [sys.executable, *map(str, args)], {**os.environ, **variables}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def torchrun(processes: int, *args: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """`torchrun ARGS`, in so many processes of one thread."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    return python(*start, *args, **{"OMP_NUM_THREADS": "1", **variables})


def places(count: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many processes, which then find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = ({"RANK": rank, "LOCAL_RANK": rank, **sizes} for rank in range(count))
    return [{name: str(value) for name, value in place.items()} for place in each]


def command(*args: object, **variables: str) -> Started:
    """`femixer ARGS`"""
    return Started(main, [*map(str, args)], **variables)
