"""`femixer mad run`: the jobs that are not finished yet, here or on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from femixer.options import parse
from femixer.tasks.mad.jobs import Experiment
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.mad.store import KIND
from femixer.tasks.mad.table import markdown, tabulate
from femixer.training import jobs
from femixer.training.jobs import Jobs
from femixer.training.results import Record


@dataclass(frozen=True)
class Command:
    """Train models on the tasks of MAD.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/mad")))
    select: Literal["validation", "test"] = "validation"
    """Split that selects for the table at the end, as in `femixer mad table`; nothing that is run depends on it."""


def run(command: Command) -> int:
    experiment = command.experiment
    experiment.validate()
    ran = jobs.run(experiment.jobs(), KIND, command.how, PROTOCOLS[experiment.protocol].resumable)
    if ran is None:
        return 0
    show(ran.records, command)
    return 1 if ran.failed else 0


def show(records: Sequence[Record], command: Command) -> None:
    """The table of what is finished."""
    try:
        print(markdown(tabulate(records, command.select)))
    except ValueError as error:  # the jobs are done; that older ones do not fit is not their fault
        print(f"no table: {error}")
    out = command.how.out
    print(f"Results are in {out}/; `femixer mad table --results {out}` makes files and figures of them")


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "mad run", Command())
    try:
        return run(command)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return 130
