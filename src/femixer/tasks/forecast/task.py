"""`femixer forecast train` and `run`: one forecaster, or models x data sets x horizons x seeds as jobs of a store."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from femixer.models.quiet import without_bars
from femixer.options import check, expanded, parse
from femixer.reporting import Table, as_markdown
from femixer.tasks.forecast import TASK
from femixer.tasks.forecast.data import LOOKBACKS, PACKAGED, Reading, Series, read
from femixer.tasks.forecast.data.files import frequency_of
from femixer.tasks.forecast.data.windows import scaling_of
from femixer.tasks.forecast.fit import WIDER, Fitted, curve, fitted, score
from femixer.tasks.forecast.model import MODELS, NAIVE, Sizes, Spec, Training, build_model, check_possible, specified
from femixer.tasks.forecast.table import COLUMNS, DATASETS, tabulate
from femixer.tasks.runner import DataJob, Run
from femixer.training import Results, RunOptions, distributed, show_table
from femixer.training.jobs import RECORD, Jobs
from femixer.training.results import MODEL, Record, new_model


class ForecastJob(DataJob):
    """A model trained on one data set, for one horizon, with one seed."""

    def read(self) -> Series:
        return read(self.data, self.reading)

    def fitted(self, data: Series, options: RunOptions) -> Record:
        return fitted(self.spec, data, Results("forecast", self.spec, options)).record

    def summary(self, record: Record) -> str:
        return f"test MSE {record['mse']:.4f} MAE {record['mae']:.4f} of step {record['best_step']}"


@dataclass(frozen=True)
class Setting:
    """What one training and many have in common."""

    lookback: int | None = None
    """Rows to forecast from, by default the protocol's: 1024 up to horizon 96, 2048 up to 336, else 4096."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Train(Setting):
    """Train a forecaster on a series: one row per time stamp, one column per channel.

    The results folder gets config.json, metrics.jsonl, figure.png, table.md and model/, the weights of the best
    validation MSE, which `femixer forecast predict` loads. Errors are in units of the training rows' deviation.
    """

    model: str = "FEM-SM"
    """Model as named in the paper's table, or DLinear, NLinear, PatchTST, iTransformer, LastValue, SeasonalNaive."""
    data: str = PACKAGED
    """A CSV or parquet file with a column of dates, or folder/NAME of one; seattle-temps needs no file."""
    horizon: int = 96
    """Rows to forecast."""
    seed: int = 0
    """Seed of the weights, of the order of the windows and of dropout."""
    run: RunOptions = field(default_factory=lambda: RunOptions(Path("results/forecast")))


def trained(command: Train) -> Results:
    """Train, score and save a model; the folder then holds everything about it."""
    command.run.apply()
    command.sizes.validate([command.model])
    series = read(command.data, command.reading)
    spec = specified(
        command.model, series, command.horizon, command.lookback, command.seed, command.sizes, command.training
    )
    check_possible(spec, series)
    if frequency_of(series.dates) is None and distributed.is_main():
        told = "rows are taken as equally far apart, and `femixer forecast predict` may not take such dates"
        print(f"{command.data} has irregular dates: {told}", file=sys.stderr)
    results = Results("forecast", spec, command.run, (RECORD,))
    if not results.finished:
        made = fitted(spec, series, results)
        rivals = naive(spec, series, made)
        distributed.on_main(lambda: finish(results, spec, made, rivals))
    return results


def naive(spec: Spec, series: Series, made: Fitted) -> dict[str, dict[str, float]]:
    """Test errors of the forecasts that learn nothing, for comparison."""
    errors = {}
    for name in NAIVE:
        model = build_model(replace(spec, fields=MODELS[name]), series, scaling_of(series))
        errors[name] = score(model, made.windows["test"], WIDER * spec.training.batch)
    return errors


def finish(results: Results, spec: Spec, made: Fitted, rivals: dict[str, dict[str, float]]) -> None:
    """Save the model, and write figure and table: what makes the run finished comes last."""
    with new_model(results.folder / MODEL) as partial, without_bars():
        made.model.save_pretrained(partial)
    TASK.keep(made.record, results.folder)
    results.write_figure(curve(made.record, spec.title))
    results.finish(as_markdown(summary(spec, made, rivals)))


def summary(spec: Spec, made: Fitted, rivals: dict[str, dict[str, float]]) -> Table:
    record, counts = made.record, {split: each.count for split, each in made.windows.items()}
    per_epoch = -(-counts["train"] // spec.training.batch)
    epochs = [str(record[name] // per_epoch) for name in ("steps", "best_step")]
    errors = [f"{record[name]:.4f}" for name in ("validation_mse", "mse", "mae")]
    rows = [[spec.model, f"{record['parameter_count']:,}", *epochs, *errors]]
    rows += [
        [name, "0", "", "", "", f"{errors['mse']:.4f}", f"{errors['mae']:.4f}"]
        for name, errors in rivals.items()
        if name != spec.model
    ]
    title = (
        f"{spec.dataset}: {spec.horizon} rows from {spec.lookback}, seed {spec.seed}; "
        + ", ".join(f"{count:,} {split}" for split, count in counts.items())
        + " windows. The best weights by validation MSE, scored on the test split, in scaled units."
    )
    notes = [f"Training ended early: {record['diverged']}."] if record["diverged"] else []
    columns = ("model", "parameters", "epochs", "best", "validation MSE", "test MSE", "test MAE")
    return Table.of(columns, rows, title, *notes)


def train(args: Sequence[str]) -> int:
    results = trained(parse(Train, args, "forecast train", Train()))
    return show_table(results)


@dataclass(frozen=True)
class Experiment(Setting):
    """What is run."""

    models: tuple[str, ...] = ("FEM-SM", "SMAttn", "DLinear", "SeasonalNaive")
    """Models as named in the paper's table, or DLinear, NLinear, PatchTST, iTransformer, LastValue, SeasonalNaive.
    paper: the nine of its table; all: every one."""
    data: tuple[str, ...] = (PACKAGED,)
    """CSV or parquet files with a column of dates, or folder/NAME of some; seattle-temps needs no file."""
    horizons: tuple[int, ...] = tuple(LOOKBACKS)
    """Rows to forecast."""
    seeds: int = 1
    """Runs of everything, with seeds that go up from --seed."""
    seed: int = 0
    """The first seed."""
    paper: Path | None = None
    """Run the paper's table: a folder with weather, solar, ETTh1, ETTh2, ETTm1 and ETTm2 (CSV or parquet), on which its
    nine models are trained for all horizons. Other options still apply."""

    def jobs(self) -> list[ForecastJob]:
        """Each once, all of the first seed first; a ValueError if one of them is not possible."""
        for name in ("models", "data", "horizons"):
            given = getattr(self, name)
            check(0 < len(given) == len({*given}), name, given, "different ones")
        check(self.seeds > 0, "seeds", self.seeds, "a whole number above 0")
        self.sizes.validate(self.models)
        made: list[ForecastJob] = []
        for data in self.data:
            series = read(data, self.reading)
            pairs = itertools.product(self.horizons, self.models)
            first = [ForecastJob(self.spec(series, *pair), data, self.reading) for pair in pairs]
            seeds = range(self.seed, self.seed + self.seeds)
            made += [replace(job, spec=replace(job.spec, seed=seed)) for seed in seeds for job in first]
        made.sort(key=lambda job: job.spec.seed)
        return [*{job.digest: job for job in made}.values()]

    def spec(self, series: Series, horizon: int, model: str) -> Spec:
        """Checked, with the first seed."""
        spec = specified(model, series, horizon, self.lookback, self.seed, self.sizes, self.training)
        check_possible(spec, series)
        return spec


@dataclass(frozen=True)
class ForecastRun(Run):
    """Train models on series, each on every one of them, for every horizon and with every seed.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/forecasts")))

    def jobs(self) -> list[ForecastJob]:
        return self.experiment.jobs()

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records)

    @classmethod
    def parse(cls, args: Sequence[str], command: str) -> Self:
        default = cls()
        given = parse(cls, args, command, default)
        if given.experiment.paper is not None:  # another set of defaults
            data = tuple(str(given.experiment.paper / name) for name in DATASETS)
            asked = replace(default.experiment, models=COLUMNS, data=data)
            given = parse(cls, args, command, replace(default, experiment=asked))
        models = expanded(given.experiment.models, {"all": tuple(MODELS), "paper": COLUMNS})
        return replace(given, experiment=replace(given.experiment, models=models))
