"""A job, carrying it out in whatever process it was given to, and who does so: this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from femixer.optional import require
from femixer.options import check, check_threads
from femixer.training import atomic
from femixer.training.jobs.store import RUNNING, add_record, is_finished
from femixer.training.processes import Interrupted, carried_out, cores
from femixer.training.results import Record, RunOptions, holds_run, release


class Job(ABC):
    """One training: a frozen dataclass that travels to other processes, so it must be possible to pickle it."""

    @property
    def definition(self) -> Any:
        """The dataclass of everything that decides the numbers, by default the job itself."""
        return self

    @property
    @abstractmethod
    def title(self) -> str:
        """For people."""

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the definition."""
        text = json.dumps(asdict(self.definition), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Of its files: the title, without spaces, and the digest."""
        return "-".join([*self.title.split(), self.digest])

    @abstractmethod
    def carry_out(self, options: RunOptions) -> Record:
        """Train in the folder of `options`, from the checkpoint there if there is one: the record of the store."""

    @abstractmethod
    def summary(self, record: Record) -> str:
        """What came out, in a few words."""


@dataclass(frozen=True)
class Assignment:
    """A job, and where and how to do it: nothing of the latter decides its numbers, except for rounding."""

    job: Job
    store: Path
    resumable: bool
    device: Literal["auto", "cpu"]
    threads: int


@dataclass(frozen=True)
class Outcome:
    """Of a job: its record, or why there is none. Neither: another process is at it, or has done it meanwhile."""

    job: Job
    record: Record | None = None
    error: str | None = None


def attempt(assignment: Assignment) -> Outcome:
    """Carry out a job in this process; a failure is an outcome too."""
    filelock = require("filelock", "lm")
    job, folder = assignment.job, running(assignment)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, lock = (folder.with_name(folder.name + ending) for ending in (".log", ".lock"))
    keep = 1 if assignment.resumable else 0
    options = RunOptions(
        folder, resume=holds_run(folder), threads=assignment.threads, device=assignment.device, keep=keep
    )
    try:
        with filelock.FileLock(lock, timeout=0), removed(lock):
            if is_finished(assignment.store, job.name):
                return Outcome(job)
            try:
                with log.open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
                    record = job.carry_out(options)
            finally:
                release(folder)
            if assignment.store.is_dir():  # before another process can get the lock
                add_record(assignment.store, job.name, record)
            for path in (folder, log):
                atomic.remove(path)
        return Outcome(job, record)
    except filelock.Timeout:
        return Outcome(job)
    except Interrupted as stop:
        return Outcome(job, error=str(stop))
    except Exception:
        return Outcome(job, error=traceback.format_exc())


@contextlib.contextmanager
def alone(assignment: Assignment) -> Iterator[None]:
    """Nobody carries out the job meanwhile; a ValueError if somebody does."""
    filelock = require("filelock", "lm")
    folder = running(assignment)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(folder.name + ".lock")
    try:
        with filelock.FileLock(lock, timeout=0), removed(lock):
            yield
    except filelock.Timeout:
        raise ValueError(
            f"overwrite=True is not allowed while another process is at {assignment.job.title!r} in "
            f"{assignment.store}; wait for it to end, or choose another --out"
        ) from None


@contextlib.contextmanager
def removed(lock: Path) -> Iterator[None]:
    """Remove the file of a lock while it is held: afterwards it may be another's."""
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):  # Windows removes no file that is open
            lock.unlink(missing_ok=True)


def running(assignment: Assignment) -> Path:
    """The folder of the training run: in the store, or on a machine that does not see the store on its own disk."""
    if assignment.store.is_dir():
        return assignment.store / RUNNING / assignment.job.name
    return Path(tempfile.gettempdir()) / "femixer-jobs" / assignment.job.name


@dataclass(frozen=True)
class JobEngine:
    """Where the jobs run."""

    engine: Literal["local", "ray"] = "local"
    """local: processes on this machine; ray: a Ray cluster, or Ray started on this machine."""
    jobs: int | None = None
    """Jobs at a time. By default one per CPU core, or one if there is a GPU; under Ray what its resources allow."""
    threads: int = 1
    """CPU threads of a job."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: auto takes a GPU that torch can use, if there is one."""
    address: str | None = None
    """Ray cluster: host:port, ray://host:port or auto, by default RAY_ADDRESS; without either one is started here."""
    gpus: float = 0.0
    """GPUs of a job under Ray; 0.25 puts four jobs on each."""

    def validate(self) -> None:
        check(self.engine in ("local", "ray"), "engine", self.engine, "local or ray")
        check(self.jobs is None or self.jobs > 0, "jobs", self.jobs, "a whole number above 0")
        check_threads(self.threads)
        check(self.device in ("auto", "cpu"), "device", self.device, "auto or cpu")
        check(self.address is None or self.engine == "ray", "address", self.address, "--engine ray too")
        check(self.gpus >= 0, "gpus", self.gpus, "a number of at least 0")
        check(self.gpus == 0 or self.engine == "ray", "gpus", self.gpus, "--engine ray too")

    @contextlib.contextmanager
    def ready(self, assignments: Sequence[Assignment]) -> Iterator[Iterator[Outcome]]:
        """The outcomes of the jobs as they come. Leaving this stops those that are not done."""
        if self.engine == "ray":
            with connected(self.address, self.jobs):
                yield on_ray(assignments, self.jobs, self.threads, self.gpus)
        else:
            gpu = self.device == "auto" and torch.cuda.is_available()
            jobs = self.jobs or (1 if gpu else max(1, cores() // self.threads))
            with contextlib.closing(local(assignments, jobs)) as outcomes:
                yield outcomes


DIED = (
    "the process of this job died: out of memory, or killed, or it could not start (a script that runs jobs needs "
    'the line `if __name__ == "__main__":`)'
)


def local(assignments: Sequence[Assignment], jobs: int) -> Generator[Outcome, None, None]:
    """The outcomes, of `jobs` processes at a time."""
    with contextlib.closing(carried_out(attempt, assignments, jobs)) as finished:
        for assignment, future in finished:
            died = isinstance(future.exception(), BrokenProcessPool)
            yield Outcome(assignment.job, error=DIED) if died else future.result()


AHEAD = 1000
"""Jobs that wait in Ray's queue: a cluster that grows with its queue must see one."""


def on_ray(assignments: Sequence[Assignment], jobs: int | None, threads: int, gpus: float) -> Iterator[Outcome]:
    """The outcomes, of a Ray that this process is connected to; at most `jobs` at a time, if given."""
    ray = require("ray", "cluster")
    work = ray.remote(attempt).options(num_cpus=threads, num_gpus=gpus)
    waiting, pending = iter(assignments), dict[Any, Assignment]()
    while True:
        for assignment in islice(waiting, (jobs or AHEAD) - len(pending)):
            pending[work.remote(assignment)] = assignment
        if not pending:
            return
        ready, _ = ray.wait([*pending], num_returns=1)
        assignment = pending.pop(ready[0])
        try:
            yield ray.get(ready[0])
        except ray.exceptions.RayError as error:
            yield Outcome(assignment.job, error=f"{DIED} ({error})")


@contextlib.contextmanager
def connected(address: str | None, jobs: int | None) -> Iterator[None]:
    """A connection to the Ray at `address` (or RAY_ADDRESS), or without either a Ray of this machine's own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A Ray of this machine's own would run the jobs at the lowest priority, behind whatever else there is.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = require("ray", "cluster")
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address in (None, "local"):
        ray.init("local", num_cpus=jobs or cores(), include_dashboard=False, **quiet)
    else:
        check_reachable(address)
        try:
            ray.init(address, **quiet)
        except Exception as error:  # Ray has several for this
            raise ConnectionError(f"address={address!r}: no connection to Ray ({first_line(error)})") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_reachable(address: str, seconds: float = 5.0) -> None:
    """Raise a ConnectionError unless a server of Ray's kind answers there: Ray itself would try for minutes."""
    place = address.removeprefix("ray://")
    if place == "auto" or os.environ.get("RAY_USE_TLS") == "1":
        return
    fits = place.rpartition(":")[0] and place.rpartition(":")[2].isdecimal()
    check(bool(fits), "address", address, "auto, host:port or ray://host:port")
    grpc = require("grpc", "cluster")
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:  # as Ray connects
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"address={address!r}: no Ray cluster answers there") from None


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
