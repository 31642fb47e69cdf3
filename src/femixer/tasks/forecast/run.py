"""`femixer forecast run`: models x data sets x horizons x seeds, as jobs that are not finished yet."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from femixer.options import check, parse
from femixer.tasks.forecast.experiment import Sizes, Spec, Training, specified
from femixer.tasks.forecast.forecaster import check_possible
from femixer.tasks.forecast.job import Job
from femixer.tasks.forecast.known import LOOKBACKS, PACKAGED
from femixer.tasks.forecast.source import Reading, Series, read
from femixer.tasks.forecast.store import KIND
from femixer.tasks.forecast.table import markdown, tabulate
from femixer.training import jobs
from femixer.training.jobs import Jobs


@dataclass(frozen=True)
class Experiment:
    """What is run."""

    models: tuple[str, ...] = ("FEM-SM", "SMAttn", "DLinear", "SeasonalNaive")
    """Models as named in the paper's table, or DLinear, NLinear, PatchTST, iTransformer, LastValue, SeasonalNaive."""
    data: tuple[str, ...] = (PACKAGED,)
    """CSV or parquet files with a column of dates, or folder/NAME of some; seattle-temps needs no file."""
    horizons: tuple[int, ...] = tuple(LOOKBACKS)
    """Rows to forecast."""
    lookback: int | None = None
    """Rows to forecast from, by default the protocol's: 1024 up to horizon 96, 2048 up to 336, else 4096."""
    seeds: int = 1
    """Runs of everything, with seeds that go up from --seed."""
    seed: int = 0
    """The first seed."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)

    def jobs(self) -> list[Job]:
        """Each once, all of the first seed first; a ValueError if one of them is not possible."""
        for name in ("models", "data", "horizons"):
            given = getattr(self, name)
            check(0 < len(given) == len({*given}), name, given, "different ones")
        check(self.seeds > 0, "seeds", self.seeds, "a whole number above 0")
        self.sizes.validate(self.models)
        made = []
        for data in self.data:
            series = read(data, self.reading)
            first = [Job(self.spec(series, horizon, model), data, self.reading) for horizon, model in self.pairs()]
            made += [
                replace(job, spec=replace(job.spec, seed=self.seed + n)) for n in range(self.seeds) for job in first
            ]
        made.sort(key=lambda job: job.spec.seed)
        return [*{job.digest: job for job in made}.values()]

    def pairs(self) -> Iterator[tuple[int, str]]:
        return itertools.product(self.horizons, self.models)

    def spec(self, series: Series, horizon: int, model: str) -> Spec:
        """Checked, with the first seed."""
        spec = specified(model, series, horizon, self.lookback, self.seed, self.sizes, self.training)
        check_possible(spec, series)
        return spec


@dataclass(frozen=True)
class Command:
    """Train models on series, each on every one of them, for every horizon and with every seed.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/forecasts")))


def run(command: Command) -> int:
    ran = jobs.run(command.experiment.jobs(), KIND, command.how, resumable=True)
    if ran is None:
        return 0
    return ran.tell(lambda records: markdown(tabulate(records)), command.how.out, "forecast table")


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "forecast run", Command())
    try:
        return run(command)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return 130
