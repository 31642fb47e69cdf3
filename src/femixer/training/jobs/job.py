"""A job: what it is to those who carry it out, and carrying it out in whatever process it was given to."""

import contextlib
import functools
import hashlib
import json
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from femixer.optional import require
from femixer.training import atomic
from femixer.training.jobs.store import RUNNING, put, record_path
from femixer.training.processes import Interrupted
from femixer.training.results import Record, RunOptions


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
        """Of its files: the title and the digest."""
        return f"{self.title} {self.digest}"

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
    options = RunOptions(folder, resume=True, threads=assignment.threads, device=assignment.device, keep=keep)
    try:
        with filelock.FileLock(lock, timeout=0), removed(lock):
            finished = record_path(assignment.store, job.name)
            if finished.exists():
                return Outcome(job)
            with log.open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
                record = job.carry_out(options)
            if assignment.store.is_dir():  # before another process can get the lock
                put(finished, json.dumps(record) + "\n")
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
