"""Training a forecaster: to the best validation MSE, whose weights are then scored on the test split, once."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from femixer.models.forecast import Forecaster
from femixer.models.parameters import parameters_of
from femixer.optional import require
from femixer.reporting.figures import BLUE, GREY, VERMILION, figure, label, quiet
from femixer.tasks.forecast.data import Series
from femixer.tasks.forecast.data.windows import Windows, windows
from femixer.tasks.forecast.model import Spec, build_model
from femixer.training import EngineOptions, Fit, Results, TrainOptions, adamw, distributed, train
from femixer.training.best import Best
from femixer.training.optimizer import one_cycle
from femixer.training.results import Record, environment
from femixer.training.seeding import Epochs


def score(model: Callable[..., Tensor], windows: Windows, batch: int) -> dict[str, float]:
    """MSE and MAE: the means of (forecast - future)^2 and |forecast - future| over all known values of all windows."""
    sums = torch.zeros(2, dtype=torch.float64)
    known = 0
    mine = torch.arange(windows.count)[distributed.part().rows(windows.count)]
    for numbers in mine.split(batch):
        given = windows.take(numbers)
        error = model(given.history, given.observed) - given.future
        if given.future_observed is not None:
            error = error[given.future_observed]
        known += error.numel()
        sums += torch.stack([error.square().sum(dtype=torch.float64), error.abs().sum(dtype=torch.float64)]).cpu()
    squared, absolute, count = distributed.total(*sums.tolist(), known)
    if count == 0:
        raise ValueError("the rows of a split have no value at all: everything in them is missing")
    return {"mse": squared / count, "mae": absolute / count}


BETAS, CLIP = (0.9, 0.95), 1.0
WIDER = 4
"""Batches of training that are scored at once: nothing is kept for a backward pass."""


@dataclass(frozen=True)
class Fitted:
    """A model with its best weights, and its record."""

    model: Forecaster
    windows: Mapping[str, Windows]
    record: Record


def fitted(spec: Spec, series: Series, results: Results) -> Fitted:
    """Train in the folder of `results`, from the checkpoint there if there is one."""
    device = distributed.start()
    split, scaling = windows(series, spec.lookback, spec.horizon, device)
    model = build_model(spec, series, scaling)
    best = Best(model, results, lambda record: (record["mse"],), spec.training.patience)
    diverged = None
    try:
        fit(spec, model, split, results, best)
    except FloatingPointError as error:  # a rate that is too high for this model: a result like others
        diverged = str(error)
    if model.trainable:
        best.load()
    metrics = with_test(spec, model, split["test"], results)
    return Fitted(model, split, record(spec, metrics, diverged, parameters_of(model), device))


def fit(spec: Spec, model: Forecaster, split: Mapping[str, Windows], results: Results, best: Best) -> None:
    how = spec.training

    def evaluate(forecaster: Forecaster) -> list[Record]:
        return [{"split": "validation", **score(forecaster, split["validation"], WIDER * how.batch)}]

    if not model.trainable:
        if not best.scores():
            results.append([{**evaluate(model)[0], "step": 0, "seconds": 0.0}])
        return
    epochs = Epochs(split["train"].count, how.batch, spec.seed)
    steps = how.epochs * epochs.per_epoch
    training = Fit(
        model=model,
        optimizer=lambda model: adamw(model, how.lr, how.weight_decay, BETAS, fused=True),
        batch=lambda step, part: split["train"].take(epochs(step, part)),
        losses=lambda model, batch: model(batch.history, batch.observed, batch.future, batch.future_observed),
        items=lambda batch: len(batch.history),
        evaluate=evaluate,
        enough=best.enough,
    )
    options = TrainOptions(
        steps=steps,
        evaluate_every=epochs.per_epoch,
        seed=spec.seed,
        schedule=one_cycle(steps),
        clip=CLIP,
        log_every=epochs.per_epoch,
        engine=EngineOptions(precision=how.precision),
    )
    train(training, options, results)


def with_test(spec: Spec, model: Forecaster, windows: Windows, results: Results) -> list[Record]:
    """The records of the run, the last of them the test errors: added unless they are there from before a crash."""
    metrics = distributed.on_main(results.metrics)
    if metrics[-1]["split"] != "test":
        model.eval()
        with torch.no_grad():
            errors = score(model, windows, WIDER * spec.training.batch)
        last = {name: metrics[-1][name] for name in ("step", "seconds")}
        metrics.append({"split": "test", **errors, **last})
        results.append(metrics[-1:])
    return metrics


def record(spec: Spec, metrics: list[Record], diverged: str | None, parameters: int, device: torch.device) -> Record:
    """What a store keeps of a training."""
    validation = [each for each in metrics if each["split"] == "validation"]
    best = min(validation, key=lambda each: (each["mse"] != each["mse"], each["mse"], each["step"]))
    return {
        **asdict(spec),
        "mse": metrics[-1]["mse"],
        "mae": metrics[-1]["mae"],
        "validation_mse": best["mse"],
        "best_step": best["step"],
        "steps": validation[-1]["step"],
        "seconds": metrics[-1]["seconds"],
        "parameter_count": parameters,
        "evaluations": [{name: each[name] for name in ("step", "mse", "mae")} for each in validation],
        "diverged": diverged,
        "environment": {**environment(), "device": device.type},
    }


PANELS = 8
"""Channels that are drawn at most."""


def curve(record: Record, title: str) -> Any:
    """Validation MSE after each epoch, and the best."""
    drawing = figure(6.5, 3.6)
    axes = drawing.subplots()
    steps, errors = ([each[name] for each in record["evaluations"]] for name in ("step", "mse"))
    axes.plot(steps, errors, color=BLUE, marker="o", markersize=3, linewidth=1.5)
    axes.plot(record["best_step"], record["validation_mse"], "D", color=VERMILION, label="best", zorder=3)
    axes.set(xlabel="training steps", ylabel="validation MSE")
    axes.set_title(label(title, 80), loc="left", fontsize=10, parse_math=False)
    quiet(axes)
    axes.legend(frameon=False)
    return drawing


def forecast_figure(history: Any, truth: Any, forecast: Any, title: str) -> Any:
    """One panel per channel, of the first PANELS: what was known, what came (where it is known) and what was forecast.

    history, truth, forecast: pandas.DataFrame over dates; truth may be empty.
    """
    columns = [*forecast.columns[:PANELS]]
    drawing = figure(9.0, 1.2 + 1.7 * len(columns))
    panels = drawing.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    for axes, column in zip(panels, columns, strict=True):
        axes.plot(history.index, history[column], color=GREY, linewidth=1.2, label="history")
        if np.isfinite(truth[column].to_numpy(dtype=float)).any():
            # From the last point of the history, so that the curve does not break.
            joined = [history[column].iloc[-1:], truth[column]]
            whole = require("pandas", "series").concat(joined)
            axes.plot(whole.index, whole, color=BLUE, linewidth=1.2, label="truth")
        axes.plot(forecast.index, forecast[column], color=VERMILION, linewidth=1.6, label="forecast")
        axes.axvline(forecast.index[0], color="0.8", linewidth=0.8, zorder=0)
        axes.set_ylabel(label(column), parse_math=False)
        quiet(axes)
    drawing.align_ylabels()
    panels[0].legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    left = len(forecast.columns) - len(columns)
    drawing.suptitle(label(title, 80) + (f" (and {left} more channels)" if left else ""), fontsize=11, parse_math=False)
    return drawing
