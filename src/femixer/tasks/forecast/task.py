"""`femixer forecast train` and `run`: one forecaster, or models x data sets x horizons x seeds as jobs of a store."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from femixer.models import Card
from femixer.models.files import without_bars
from femixer.optional import MissingExtra
from femixer.options import Count, as_typed, check_different, expanded, parse
from femixer.reporting import Table, as_markdown
from femixer.tasks.forecast import TASK
from femixer.tasks.forecast.data import ABOUT_PACKAGED, LOOKBACKS, PACKAGED, Reading, Series, read
from femixer.tasks.forecast.data.files import frequency_of
from femixer.tasks.forecast.data.windows import Held, rows_needed, too_short, training_rows
from femixer.tasks.forecast.fit import WIDER, Fitted, calibrated, coverage, curve, fitted, score
from femixer.tasks.forecast.model import (
    MODELS,
    SIMPLE,
    Sizes,
    Spec,
    Training,
    build_model,
    check_possible,
    model_name,
    specified,
)
from femixer.tasks.forecast.table import COLUMNS, DATASETS, NO_SEASON, tabulate
from femixer.tasks.runner import DataJob, Run, Seeds, told
from femixer.training import Results, RunOptions, distributed, show_table
from femixer.training.jobs import Jobs
from femixer.training.loop import check_trained, untrained_note
from femixer.training.results import MODEL, Record, new_model
from femixer.training.store import RECORD


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
    """Options shared by one training and many."""

    lookback: int | None = None
    """Rows to forecast from, by default the protocol's: 1024 up to horizon 96, 2048 up to 336, else 4096."""
    quantiles: tuple[float, ...] = ()
    """Quantiles to forecast besides the mean, as 0.1 0.5 0.9, with a loss of their own."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Train(Setting):
    """Train a forecaster on a series: one row per time stamp, one column per channel; or on many, one below the other.

    The results folder gets config.json, metrics.jsonl, figure.png, table.md and model/, the weights of the best
    validation MSE, which `femixer forecast predict` loads. Errors are in units of the training rows' deviation.
    """

    model: str = "FEM-SM"
    """Model of the paper's table, or DLinear, NLinear, PatchTST, iTransformer, ETS, LastValue, SeasonalNaive."""
    data: str = PACKAGED
    """A CSV or parquet file with a column of dates, or folder/NAME of one; seattle-temps needs no file."""
    horizon: Count = 96
    """Rows to forecast."""
    seed: int = 0
    """Seed of the weights, of the order of the windows and of dropout."""
    run: RunOptions = field(default_factory=lambda: RunOptions(Path("results/forecast")))


def prepared(command: Train, held: Held | None = None) -> tuple[Spec, Series]:
    """What is trained, and on what; the user is told what there is to know of the data."""
    command.sizes.validate([model_name(command.model)])
    series = read(command.data, command.reading)
    how = (command.sizes, command.training, command.quantiles)
    spec = specified(command.model, series, command.horizon, command.lookback, command.seed, *how)
    lines = [*series.told]
    if frequency_of(series.clock) is None:
        rest = "rows are taken as equally far apart, and `femixer forecast predict` may not take such dates"
        lines.append(f"{command.data} has irregular dates: {rest}")
    short = too_short(series, spec.horizon, held)
    if short:
        names = ", ".join(short[:3]) + (", ..." if len(short) > 3 else "")
        rest = f"with fewer than {rows_needed(spec.horizon, held)} rows, are not trained on: {names}"
        lines.append(f"{command.data}: {len(short)} of {len(series.sections)} series, {rest}")
    if distributed.is_main():
        for line in lines:
            print(line, file=sys.stderr)
    return spec, series


def simple(spec: Spec, series: Series, made: Fitted, held: Held | None = None) -> dict[str, dict[str, float]]:
    """Test errors of the forecasts that learn nothing or little, for comparison."""
    found: dict[str, dict[str, float]] = {}
    for name in (name for name in SIMPLE if name != spec.model):
        model = build_model(replace(spec, model=name, fields=MODELS[name]), series, made.scaling, held)
        try:
            model.estimate(training_rows(series, spec.horizon, held))
        except MissingExtra as error:  # of a package that only this one needs: no reason to lose a training
            print(f"{name} is not in the table: {error}", file=sys.stderr)
            found[name] = {}
            continue
        with torch.no_grad():
            found[name] = score(model, made.windows["test"], WIDER * spec.training.batch, f"test ({name})")
    return found


def finish(results: Results, spec: Spec, made: Fitted, rivals: dict[str, dict[str, float]], about: str) -> None:
    """Save the model, and write figure and table: what makes the run finished comes last."""
    record = made.record
    calibrated(made.model, made.windows["validation"], WIDER * spec.training.batch)
    made.model.card = Card(
        data=f"{about}: {spec.horizon} rows from {spec.lookback}. Errors are in units of the training rows' deviation.",
        command=as_typed(),
        metrics={"validation MSE": record["validation_mse"], "test MSE": record["mse"], "test MAE": record["mae"]},
    )
    with new_model(results.folder / MODEL) as partial, without_bars():
        made.model.save_pretrained(partial)
    TASK.keep(made.record, results.folder)
    results.write_figure(curve(made.record, spec.title))
    results.finish(as_markdown(summary(spec, made, rivals, about)))


def summary(spec: Spec, made: Fitted, rivals: dict[str, dict[str, float]], about: str) -> Table:
    record, counts = made.record, {split: each.count for split, each in made.windows.items()}
    per_epoch = -(-counts["train"] // spec.training.batch)
    epochs = [str(record[name] // per_epoch) for name in ("steps", "best_step")]
    errors = [f"{record[name]:.4f}" for name in ("validation_mse", "mse", "mae")]
    rows = [[spec.model, f"{record['parameter_count']:,}", *epochs, *errors]]
    channels = made.model.config.channels
    rows += [
        [name, str(4 * channels if name == "ETS" else 0), "", "", "", f"{errors['mse']:.4f}", f"{errors['mae']:.4f}"]
        for name, errors in rivals.items()
        if errors
    ]
    title = (
        f"{spec.dataset}: {spec.horizon} rows from {spec.lookback}, seed {spec.seed}; "
        + ", ".join(f"{count:,} {split}" for split, count in counts.items())
        + " windows. The best weights by validation MSE, scored on the test split, in scaled units."
    )
    notes = [f"Data: {about}.", *untrained_note(record)]
    notes += [f"Training ended early: {record['diverged']}."] if record["diverged"] else []
    notes += [
        f"Intervals ({kind}) hold of the test values: {', '.join(f'{s:.1f} % at {v:g} %' for v, s in shares.items())}."
        for kind, shares in coverage(made.model, made.windows["test"], WIDER * spec.training.batch).items()
    ]
    if "SeasonalNaive" in rivals and rivals["SeasonalNaive"] == rivals.get("LastValue"):
        notes.append(NO_SEASON)
    columns = ("model", "parameters", "epochs", "best", "validation MSE", "test MSE", "test MAE")
    return Table.of(columns, rows, title, *notes)


def train(args: Sequence[str]) -> int:
    """Train, score and save a model; the folder then holds everything about it."""
    command = parse(Train, args, "forecast train", Train())
    command.run.apply()
    about = told(command.data, ABOUT_PACKAGED)
    spec, series = prepared(command)
    check_possible(spec, series)
    results = Results("forecast", spec, command.run, (RECORD,), {"data": about})
    if not results.finished:
        made = fitted(spec, series, results)
        check_trained(made.record)
        rivals = simple(spec, series, made)
        distributed.on_main(lambda: finish(results, spec, made, rivals, about))
        check_trained(made.record, f"{results.folder / MODEL}/")
    return show_table(results)


@dataclass(frozen=True)
class Experiment(Setting, Seeds):
    """What is run."""

    models: tuple[str, ...] = ("FEM-SM", "SMAttn", "DLinear", "SeasonalNaive")
    """Models of the paper's table, or DLinear, NLinear, PatchTST, iTransformer, ETS, LastValue, SeasonalNaive.
    paper: the nine of its table; all: every one."""
    data: tuple[str, ...] = (PACKAGED,)
    """CSV or parquet files with a column of dates, or folder/NAME of some; seattle-temps needs no file."""
    horizons: tuple[int, ...] = tuple(LOOKBACKS)
    """Rows to forecast."""
    paper: Path | None = None
    """Run the paper's table (nine models, all horizons); other options still apply.
    The folder holds weather, solar, ETTh1, ETTh2, ETTm1 and ETTm2 (CSV or parquet)."""

    def jobs(self) -> list[ForecastJob]:
        """Each once, all of the first seed first; a ValueError if one of them is not possible."""
        for name in ("models", "data", "horizons"):
            check_different(self, name)
        seeds = self.every_seed()
        self.sizes.validate([model_name(name) for name in self.models])
        told(", ".join(self.data), ABOUT_PACKAGED)
        made: list[ForecastJob] = []
        for data in self.data:
            series = read(data, self.reading)
            pairs = itertools.product(self.horizons, self.models)
            first = [ForecastJob(self.spec(series, *pair), data, self.reading) for pair in pairs]
            made += [replace(job, spec=replace(job.spec, seed=seed)) for seed in seeds for job in first]
        made.sort(key=lambda job: job.spec.seed)
        return [*{job.digest: job for job in made}.values()]

    def spec(self, series: Series, horizon: int, model: str) -> Spec:
        """Checked, with the first seed."""
        spec = specified(model, series, horizon, self.lookback, self.seed, self.sizes, self.training, self.quantiles)
        check_possible(spec, series)
        return spec


@dataclass(frozen=True)
class ForecastRun(Run):
    """Train models on series, each on every one of them, for every horizon and with every seed.

    Finished jobs are in the store and are not repeated: the same command, given again, goes on.
    """

    experiment: Experiment = field(default_factory=Experiment)
    how: Jobs = field(default_factory=lambda: Jobs(Path("results/forecasts")))

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
