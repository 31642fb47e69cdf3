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
    return ran.tell(lambda records: markdown(tabulate(records, command.select)), command.how.out, "mad table")


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "mad run", Command())
    try:
        return run(command)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return 130
