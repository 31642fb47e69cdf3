"""`femixer forecast train`: a forecaster from a series."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from femixer.models.forecast import Forecaster
from femixer.models.quiet import without_bars
from femixer.options import parse
from femixer.tasks.forecast.dates import frequency_of
from femixer.tasks.forecast.experiment import Sizes, Spec, Training, specified
from femixer.tasks.forecast.figures import curve
from femixer.tasks.forecast.fitting import WIDER, Fitted, fitted
from femixer.tasks.forecast.forecaster import build_model, check_possible
from femixer.tasks.forecast.known import PACKAGED
from femixer.tasks.forecast.named import MODELS, NAIVE
from femixer.tasks.forecast.scoring import score
from femixer.tasks.forecast.source import Reading, Series, read
from femixer.tasks.forecast.windows import scaling_of
from femixer.training import Results, RunOptions, atomic, distributed, show_table
from femixer.training.results import MODEL


@dataclass(frozen=True)
class Command:
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
    lookback: int | None = None
    """Rows to forecast from, by default the protocol's: 1024 up to horizon 96, 2048 up to 336, else 4096."""
    seed: int = 0
    """Seed of the weights, of the order of the windows and of dropout."""
    reading: Reading = field(default_factory=Reading)
    sizes: Sizes = field(default_factory=Sizes)
    training: Training = field(default_factory=Training)
    run: RunOptions = field(default_factory=lambda: RunOptions(Path("results/forecast")))


def run(command: Command) -> Results:
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
    results = Results("forecast", spec, command.run)
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
    save(made.model, results.folder / MODEL)
    results.write_figure(curve(made.record, spec.title))
    results.finish(table(spec, made, rivals))


def save(model: Forecaster, folder: Path) -> None:
    try:
        atomic.remove(folder)
        with atomic.replacing(folder) as partial, without_bars():
            model.save_pretrained(partial)
    except Exception as error:  # each library has its own for a full disk
        raise OSError(f"{folder} could not be saved ({error}); training is, and --resume tries again") from error


def table(spec: Spec, made: Fitted, rivals: dict[str, dict[str, float]]) -> str:
    record, counts = made.record, {split: each.count for split, each in made.windows.items()}
    per_epoch = -(-counts["train"] // spec.training.batch)
    lines = [
        f"{spec.dataset}: {spec.horizon} rows from {spec.lookback}, seed {spec.seed}; "
        + ", ".join(f"{count:,} {split}" for split, count in counts.items())
        + " windows. The best weights by validation MSE, scored on the test split, in scaled units.",
        "",
        "| model | parameters | epochs | best | validation MSE | test MSE | test MAE |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| {spec.model} | {record['parameter_count']:,} | {record['steps'] // per_epoch} "
        f"| {record['best_step'] // per_epoch} | {record['validation_mse']:.4f} | {record['mse']:.4f} "
        f"| {record['mae']:.4f} |",
    ]
    lines += [
        f"| {name} | 0 | | | | {errors['mse']:.4f} | {errors['mae']:.4f} |"
        for name, errors in rivals.items()
        if name != spec.model
    ]
    if record["diverged"]:
        lines += ["", f"Training ended early: {record['diverged']}."]
    return "\n".join([*lines, ""])


def main(args: Sequence[str]) -> int:
    results = run(parse(Command, args, "forecast train", Command()))
    show_table(results)
    if distributed.is_main():
        print(f"Results are in {results.folder}/, the model in {results.folder / MODEL}/")
    return 0
