"""Many independent trainings as jobs: here or on a cluster, their records in a store that any number may write to."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from femixer.options import check
from femixer.training.jobs.engines import Assignment, Job, JobEngine, Outcome, alone
from femixer.training.jobs.store import ERRORS, INDEX, RECORD, Kind, Store, export, load
from femixer.training.journal import terminal_bar
from femixer.training.results import Record

__all__ = ["RECORD", "Job", "JobEngine", "Jobs", "Kind", "Store", "divided", "export", "load", "run"]


@contextmanager
def progress(jobs: int) -> Iterator[Callable[[Outcome], None]]:
    """Gives the function that is told each outcome: `job 3/36, 12 minutes left: ...`, or a line above a bar."""
    # Jobs take minutes or hours: all of them, and not the last half minute, tell how long one takes.
    bar = terminal_bar("{task.completed}/{task.total} jobs", speed_estimate_period=float("inf"))
    task = None if bar is None else bar.add_task("", total=jobs)
    done, began = 0, time.monotonic()

    def told(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if bar is not None:
            bar.console.print(line(outcome), highlight=False, markup=False)
            bar.advance(task)
            return
        left = (time.monotonic() - began) / done * (jobs - done)
        print(f"job {done}/{jobs}, {duration(left)} left: {line(outcome)}", file=sys.stderr, flush=True)

    with bar or nullcontext():
        yield told


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


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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


@dataclass(frozen=True)
class Ran:
    """What a command has done: the records of its jobs, of this time and of earlier ones, and how many failed."""

    records: Sequence[Record]
    failed: int


def run(everything: Sequence[SomeJob], kind: Kind, how: Jobs, resumable: bool) -> Ran | None:
    """Carry out the jobs that are not in the store yet; None if that was not asked for.

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
    print(f"{counted(len(mine))}, {len(mine) - len(todo)} of them finished before", file=sys.stderr)
    failed = carry_out(todo, store, how, resumable) if todo else []
    for job in failed:
        print(f"failed: {job.name}", file=sys.stderr)
    if failed:
        print(f"{counted(len(failed))} failed; why is in {store.folder / ERRORS}/, and the same command tries again")
    return Ran([store.record(job.name) for job in mine if store.finished(job.name)], len(failed))


def carry_out(todo: Sequence[Job], store: Store, how: Jobs, resumable: bool) -> list[Job]:
    """The jobs that failed; the others are in the store."""
    engine, folder = how.engine, store.folder.resolve()
    assignments = [Assignment(job, folder, resumable, engine.device, engine.threads) for job in todo]
    failed = []
    with engine.ready(assignments) as outcomes:
        if how.overwrite:
            run_again(assignments, store)
        with progress(len(todo)) as tell:
            for outcome in outcomes:
                if outcome.record is not None:
                    store.add(outcome.job.name, outcome.record)
                elif outcome.error is not None:
                    store.failed(outcome.job.name, outcome.error)
                    failed.append(outcome.job)
                tell(outcome)
    return failed


def run_again(assignments: Sequence[Assignment], store: Store) -> None:
    """Mark jobs as unfinished and remove what is left of their trainings; none if another process is at one of them."""
    for assignment in assignments:
        with alone(assignment):
            pass  # or an error, before anything is changed
    for assignment in assignments:
        with alone(assignment):
            store.run_again(assignment.job.name)


def divided(jobs: Sequence[SomeJob], part: str | None) -> Sequence[SomeJob]:
    """The share `i/n` of the jobs: the shares of 1/n, 2/n, ... n/n are all of them, and cheap and costly ones mixed."""
    if part is None:
        return jobs
    number, _, count = part.partition("/")
    allowed = "i/n with i from 1 to n, as 3/16"
    check(number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count), "part", part, allowed)
    mine = {job.digest for job in sorted(jobs, key=lambda job: job.digest)[int(number) - 1 :: int(count)]}
    return [job for job in jobs if job.digest in mine]
