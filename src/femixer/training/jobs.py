"""Many independent trainings as jobs: what one is, carrying it out in whatever process it was given to, and who does
so, this machine or a Ray cluster. Their records go to a store that any number may write to."""

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from filelock import FileLock, Timeout

from femixer.damage import in_one_line
from femixer.optional import require
from femixer.options import Count, NotNegative, arguments, check, check_options, check_threads, running
from femixer.training import atomic, distributed
from femixer.training.distributed import Interrupted, carried_out, cores
from femixer.training.journal import counting, duration
from femixer.training.results import Record, RunOptions, give_up, holds_run, release
from femixer.training.store import ERRORS, INDEX, JOBS, RUNNING, RUNS, Kind, Store


class Job(ABC):
    """One training: a frozen dataclass that travels to other processes, so it must be possible to pickle it."""

    keeps: ClassVar[bool] = False
    """Whether its results folder stays, as runs/TITLE in the store, and not its record alone."""

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
    def place(self) -> str:
        """Of the results folder that stays: the title, without spaces."""
        return "-".join(self.title.split())

    @property
    def name(self) -> str:
        """Of its files: the title, without spaces, and the digest."""
        return f"{self.place}-{self.digest}"

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
    store: Store
    resumable: bool
    device: Literal["auto", "cpu"]
    threads: int
    typed: Sequence[str] | None = field(default_factory=arguments)
    """The command line, for what the job writes."""


@dataclass(frozen=True)
class Outcome:
    """Of a job: its record, or why there is none. Neither: another process is at it, or has done it meanwhile."""

    job: Job
    record: Record | None = None
    error: str | None = None


def attempt(assignment: Assignment) -> Outcome:
    """Carry out a job in this process, or in all that torchrun started together; a failure is an outcome too."""
    job, store = assignment.job, assignment.store
    try:
        with locked(assignment) as folder:
            if distributed.on_main(lambda: store.finished(job.name)):
                return Outcome(job)
            resume = distributed.on_main(lambda: holds_run(folder))
            how: dict[str, Any] = {
                "threads": assignment.threads,
                "device": assignment.device,
                "keep": int(assignment.resumable),
            }
            log = folder.with_name(folder.name + ".log")
            try:
                with running(assignment.typed), log.open("a", encoding="utf-8") as err, redirect_stderr(err):
                    record = job.carry_out(RunOptions(folder, resume=resume, **how))
            finally:
                release(folder)

            def settle() -> None:
                if store.folder.is_dir():  # before another process can get the lock
                    if job.keeps:
                        (store.folder / RUNS).mkdir(exist_ok=True)
                        atomic.commit(folder, store.folder / RUNS / job.place)
                    store.add(job.name, record)
                for path in (folder, log):
                    atomic.remove(path)

            distributed.on_main(settle)
        return Outcome(job, record)
    except Timeout:
        return Outcome(job)
    except (Interrupted, Exception) as error:
        if distributed.world() > 1:  # the other processes wait in the middle of the job: torchrun ends them
            raise
        return Outcome(job, error=str(error) if isinstance(error, Interrupted) else traceback.format_exc())


@contextlib.contextmanager
def locked(assignment: Assignment) -> Iterator[Path]:
    """The folder of a job's training run, while nobody else carries it out; filelock's Timeout if somebody does."""
    store, name = assignment.store.folder, assignment.job.name
    # A machine that does not see the store works on its own disk.
    folder = (store / RUNNING if store.is_dir() else Path(tempfile.gettempdir()) / "femixer-jobs") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"), timeout=0)
    distributed.on_main(lambda: lock.acquire() and None)
    try:
        yield folder
    finally:
        if lock.is_locked:
            give_up(lock)


@dataclass(frozen=True)
class JobEngine:
    """Where the jobs run."""

    engine: Literal["local", "ray"] = "local"
    """local: processes on this machine; ray: a Ray cluster, or Ray started on this machine."""
    jobs: Count | None = None
    """Jobs at a time. By default one per CPU core, or one if there is a GPU; under Ray what its resources allow."""
    threads: int | None = 1
    """CPU threads of a job; None shares those of torch among --jobs."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: auto takes a GPU that torch can use, if there is one."""
    address: str | None = None
    """Ray cluster: host:port, ray://host:port or auto, by default RAY_ADDRESS; without either one is started here."""
    gpus: NotNegative = 0.0
    """GPUs of a job under Ray; 0.25 puts four jobs on each."""

    def validate(self) -> None:
        check_options(self)
        check_threads(self.threads)
        check(self.address is None or self.engine == "ray", "address", self.address, "--engine ray too")
        check(self.gpus == 0 or self.engine == "ray", "gpus", self.gpus, "--engine ray too")

    @property
    def share(self) -> int:
        """CPU threads of each job."""
        return self.threads or max(1, torch.get_num_threads() // (self.jobs or 1))

    @contextlib.contextmanager
    def ready(self, assignments: Sequence[Assignment]) -> Iterator[Iterator[Outcome]]:
        """The outcomes of the jobs as they come. Leaving this stops those that are not done."""
        if distributed.world() > 1:
            alone = self.jobs == 1 and self.engine == "local"
            check(alone, "jobs", self.jobs, "1 under torchrun, whose processes share each job, and no Ray")
            yield map(attempt, assignments)
        elif self.engine == "ray":
            with connected(self.address, self.jobs):
                yield on_ray(assignments, self.jobs, self.share, self.gpus)
        else:
            gpu = self.device == "auto" and torch.cuda.is_available()
            jobs = self.jobs or (1 if gpu else max(1, cores() // self.share))
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
            raise ConnectionError(f"address={address!r}: no connection to Ray ({in_one_line(error)})") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_reachable(address: str, seconds: float = 5.0) -> None:
    """Raise a ConnectionError unless a server of Ray's kind answers there: Ray itself would try for minutes."""
    place = address.removeprefix("ray://")
    if place == "auto" or os.environ.get("RAY_USE_TLS") == "1":
        return
    check(re.fullmatch(r".+:\d+", place) is not None, "address", address, "auto, host:port or ray://host:port")
    grpc = require("grpc", "cluster")
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:  # as Ray connects
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            raise ConnectionError(f"address={address!r}: no Ray cluster answers there") from None


def line(outcome: Outcome) -> str:
    """What became of a job."""
    job = outcome.job
    if outcome.error is not None:
        return f"{job.title} FAILED: {outcome.error.strip().splitlines()[-1]}"
    if outcome.record is None:
        return f"{job.title} is left to another process, which is at it"
    diverged = ", DIVERGED" if outcome.record.get("diverged") else ""
    return f"{job.title}: {job.summary(outcome.record)}, {duration(outcome.record['seconds'])}{diverged}"


def counted(jobs: int) -> str:
    return f"{jobs:,} job{'s' * (jobs != 1)}"


SomeJob = TypeVar("SomeJob", bound=Job)


@dataclass(frozen=True)
class Jobs:
    """Where results go and which jobs to run; nothing here changes what they compute."""

    out: Path
    """The results store. Several commands may write to one."""
    engine: JobEngine = field(default_factory=JobEngine)
    part: str | None = None
    """Run only a share of the jobs, e.g. 3/16 for the third of sixteen; for job arrays."""
    overwrite: bool = False
    """Repeat finished jobs; each keeps its record until there is a new one."""
    dry_run: bool = False
    """Only print the number of jobs."""


def run(everything: Sequence[SomeJob], kind: Kind, how: Jobs, resumable: bool) -> tuple[Sequence[Record], int] | None:
    """Carry out the jobs that are not in the store yet: the records of all of them, also from earlier times, and how
    many failed; None if that was not asked for.

    resumable: save checkpoints, so that a job which was stopped goes on. Not worth it for jobs of a minute.
    """
    how.engine.validate()
    mine = divided(everything, how.part)
    if how.dry_run:
        done = sum(Store(how.out, kind).finished(job.name) for job in mine) if (how.out / INDEX).exists() else 0
        share = "" if how.part is None else f", {len(mine)} in part {how.part}"
        print(f"{counted(len(everything))}{share}, {done} of them finished")
        return None
    store = Store(how.out, kind)
    todo = [job for job in mine if how.overwrite or not store.finished(job.name)]
    for each in todo:  # whose folder may be there with other options
        held = store.folder.glob(f"{JOBS}/{each.place}-{'?' * len(each.digest)}.json") if each.keeps else ()
        allowed = f"another folder: here {each.title} was run with other options"
        check(all(path.stem == each.name for path in held), "out", str(how.out), allowed)
    distributed.say(f"{counted(len(mine))}, {len(mine) - len(todo)} of them finished before")
    failed = carry_out(todo, store, how, resumable) if todo else []
    for job in failed:
        distributed.say(f"failed: {job.name}")
    if failed:
        print(f"{counted(len(failed))} failed; why is in {how.out / ERRORS}/, and the same command tries again")
    return [store.record(job.name) for job in mine if store.finished(job.name)], len(failed)


def carry_out(todo: Sequence[Job], store: Store, how: Jobs, resumable: bool) -> list[Job]:
    """The jobs that failed; the others are in the store."""
    assignments = [Assignment(job, store, resumable, how.engine.device, how.engine.share) for job in todo]
    failed = []
    with how.engine.ready(assignments) as outcomes:
        if how.overwrite:
            run_again(assignments, store)
        # Jobs take minutes or hours: all of them, and not the last half minute, tell how long one takes.
        with counting(len(todo), "jobs", each=True, speed_estimate_period=float("inf")) as told:
            for outcome in outcomes:
                if outcome.record is not None:
                    store.add(outcome.job.name, outcome.record)  # who carried it out may not see the store
                elif outcome.error is not None:
                    store.failed(outcome.job.name, outcome.error)
                    failed.append(outcome.job)
                told(1, line(outcome))
    return failed


def run_again(assignments: Sequence[Assignment], store: Store) -> None:
    """Mark jobs as unfinished and remove what is left of their trainings; none if another process is at one of them."""
    for change in (False, True):
        for assignment in assignments:
            try:
                with locked(assignment):
                    if change:
                        distributed.on_main(functools.partial(store.run_again, assignment.job.name))
            except Timeout:
                at = f"while another process is at {assignment.job.title!r} in {store.folder}"
                told = f"{at}; wait for it to end, or choose another --out"
                raise ValueError(f"overwrite=True is not allowed {told}") from None


def divided(jobs: Sequence[SomeJob], part: str | None) -> Sequence[SomeJob]:
    """The share `i/n` of the jobs: the shares of 1/n, 2/n, ... n/n are all of them, and cheap and costly ones mixed."""
    if part is None:
        return jobs
    fits = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = map(int, fits.groups()) if fits else (0, 0)
    check(1 <= number <= count, "part", part, "i/n with i from 1 to n, as 3/16")
    mine = {job.digest for job in sorted(jobs, key=lambda job: job.digest)[number - 1 :: count]}
    return [job for job in jobs if job.digest in mine]
