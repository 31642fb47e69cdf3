"""`femixer mad run`: the jobs that are not finished yet, here or on a cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from femixer.options import check, parse
from femixer.tasks.mad import engines
from femixer.tasks.mad.job import Job
from femixer.tasks.mad.jobs import Experiment, divided
from femixer.tasks.mad.progress import progress
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.mad.store import ERRORS, INDEX, Record, Store
from femixer.tasks.mad.table import markdown, tabulate
from femixer.tasks.mad.work import Assignment, Outcome
from femixer.training.workers import cores


@dataclass(frozen=True)
class Engine:
    """Who carries out the jobs."""

    engine: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: a Ray cluster, or a Ray of this machine's own."""
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
        check(self.threads > 0, "threads", self.threads, "a whole number above 0")
        check(self.device in ("auto", "cpu"), "device", self.device, "auto or cpu")
        check(self.address is None or self.engine == "ray", "address", self.address, "--engine ray too")
        check(self.gpus >= 0, "gpus", self.gpus, "a number of at least 0")
        check(self.gpus == 0 or self.engine == "ray", "gpus", self.gpus, "--engine ray too")

    @contextlib.contextmanager
    def ready(self, assignments: Sequence[Assignment]) -> Iterator[Iterator[Outcome]]:
        """The outcomes of the jobs as they come. Leaving this stops those that are not done."""
        if self.engine == "ray":
            with engines.connected(self.address, self.jobs):
                yield engines.on_ray(assignments, self.jobs, self.threads, self.gpus)
        else:
            gpu = self.device == "auto" and torch.cuda.is_available()
            jobs = self.jobs or (1 if gpu else max(1, cores() // self.threads))
            with contextlib.closing(engines.local(assignments, jobs)) as outcomes:
                yield outcomes


@dataclass(frozen=True)
class Command:
    """Train models on the tasks of MAD.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    engine: Engine = field(default_factory=Engine)
    out: Path = Path("results/mad")
    """The results store. Several commands may write to one."""
    part: str | None = None
    """Only a share of the jobs, as 3/16 for the third of sixteen: for job arrays."""
    overwrite: bool = False
    """Run these jobs again although they are finished."""
    dry_run: bool = False
    """Only say how many jobs there are."""
    select: Literal["validation", "test"] = "validation"
    """Split that selects for the table at the end, as in `femixer mad table`; nothing that is run depends on it."""


def run(command: Command) -> int:
    experiment, engine = command.experiment, command.engine
    experiment.validate()
    engine.validate()
    everything = experiment.jobs()
    mine = divided(everything, command.part)
    if command.dry_run:
        done = sum(Store(command.out).finished(job.name) for job in mine) if (command.out / INDEX).exists() else 0
        share = "" if command.part is None else f", {len(mine)} in part {command.part}"
        print(f"{len(everything)} jobs{share}, {done} of them finished")
        return 0
    store = Store(command.out)
    todo = [job for job in mine if command.overwrite or not store.finished(job.name)]
    print(f"{len(mine)} jobs, {len(mine) - len(todo)} of them finished before", file=sys.stderr)
    failed = carry_out(todo, store, command) if todo else []
    for job in failed:
        print(f"failed: {job.name}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} jobs failed; why is in {store.folder / ERRORS}/, and the same command tries again")
    show([store.record(job.name) for job in mine if store.finished(job.name)], command)
    return 1 if failed else 0


def show(records: Sequence[Record], command: Command) -> None:
    """The table of what is finished."""
    try:
        print(markdown(tabulate(records, command.select)))
    except ValueError as error:  # the jobs are done; that older ones do not fit is not their fault
        print(f"no table: {error}")
    print(f"Results are in {command.out}/; `femixer mad table --results {command.out}` makes files and figures of them")


def carry_out(todo: Sequence[Job], store: Store, command: Command) -> list[Job]:
    """The jobs that failed; the others are in the store."""
    resumable, engine = PROTOCOLS[command.experiment.protocol].resumable, command.engine
    assignments = [Assignment(job, store.folder.resolve(), resumable, engine.device, engine.threads) for job in todo]
    failed = []
    with engine.ready(assignments) as outcomes:
        if command.overwrite:
            for job in todo:
                store.forget(job.name)
        with progress(len(todo)) as tell:
            for outcome in outcomes:
                if outcome.record is not None:
                    store.add(outcome.job.name, outcome.record)
                elif outcome.error is not None:
                    store.failed(outcome.job.name, outcome.error)
                    failed.append(outcome.job)
                tell(outcome)
    return failed


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "mad run", Command())
    try:
        return run(command)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return 130
