"""Training a forecaster: to the best validation MSE, whose weights are then scored on the test split, once."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.models.forecast import Forecaster
from femixer.models.forecast.window import LEVELS, conformal_widths, enough_for, pair, pinball, quantile_levels
from femixer.models.named import parameters_of
from femixer.optional import require
from femixer.reporting.figures import BLUE, GREY, VERMILION, figure, label, quiet
from femixer.tasks.forecast.data import Series
from femixer.tasks.forecast.data.windows import Batch, Held, Scaling, Windows, training_rows, windows
from femixer.tasks.forecast.model import Spec, build_model
from femixer.tasks.forecast.table import ERRORS, packed
from femixer.training import EngineOptions, Fit, Results, TrainOptions, adamw, distributed, train
from femixer.training.journal import counting
from femixer.training.loop import Best, one_cycle, with_test
from femixer.training.results import Record, environment
from femixer.training.seeding import Epochs


def score(model: Callable[..., Tensor], windows: Windows, batch: int, what: str = "held-out") -> dict[str, float]:
    """MSE and MAE: the means of (forecast - future)^2 and |forecast - future| over all known values of all windows.

    what: of which windows, for progress.
    """
    return means_of(window_sums(model, windows, batch, what))


def means_of(sums: Tensor) -> dict[str, float]:
    """MSE and MAE, of the sums of all processes' windows; and the loss of quantiles where there are any."""
    count, *totals = distributed.total(*sums.sum(0).tolist())
    if count == 0:
        raise ValueError("the rows of a split have no value at all: everything in them is missing")
    return {name: total / count for name, total in zip(("mse", "mae", PINBALL), totals, strict=False)}


def window_sums(model: Any, windows: Windows, batch: int, what: str) -> Tensor:
    """[N, 3] in float64: how many known values each of this process's windows has, and sums over them of
    (forecast - future)^2 and |forecast - future|; of a model with quantiles [N, 4], with that of their loss."""
    mine = torch.arange(windows.count)[distributed.part().rows(windows.count)]
    found = []
    with counting(len(mine), f"{what} windows scored") as told:
        for numbers in mine.split(batch):
            given = windows.take(numbers)
            point, spread, known = forecasts(model, given)
            error = (point - given.future).masked_fill(~known, 0)
            parts = [known, error.square(), error.abs()]
            if spread is not None:
                parts.append(pinball(spread, given.future, model.config.quantiles).masked_fill(~known, 0))
            found.append(torch.stack([x.flatten(1).sum(1, dtype=torch.float64) for x in parts], 1).cpu())
            told(len(numbers))
    return torch.cat(found)


def forecasts(model: Any, given: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
    """The forecast [B, H, C], its quantiles [B, H, C, Q] where the model has any, and what is known of the future, bool
    [B, H, C]. Covariates are for models that were made with some: rivals on the same windows were not."""
    config = getattr(model, "config", None)
    options: dict[str, Any] = {**given.covariates} if config is not None and config.covariates else {}
    options |= {"quantiles": True} if config is not None and config.quantiles else {}
    known = given.future_observed
    known = torch.ones_like(given.future, dtype=torch.bool) if known is None else known
    found = model(given.history, given.observed, **options)
    return (*found, known) if "quantiles" in options else (found, None, known)


BETAS, CLIP = (0.9, 0.95), 1.0
PINBALL = "quantile_loss"
WIDER = 4
"""Batches of training that are scored at once: nothing is kept for a backward pass."""


@dataclass(frozen=True)
class Fitted:
    """A model with its best weights, and its record."""

    model: Forecaster
    windows: Mapping[str, Windows]
    scaling: Scaling
    record: Record


def fitted(spec: Spec, series: Series, results: Results, held: Held | None = None) -> Fitted:
    """Train in the folder of `results`, from the checkpoint there if there is one."""
    device = distributed.start()
    split, scaling = windows(series, spec.lookback, spec.horizon, device, held)
    model = build_model(spec, series, scaling, held)
    model.estimate(training_rows(series, spec.horizon, held))
    best = Best(model, results, lambda record: (validation_error(record),), spec.training.patience)
    diverged = None
    try:
        fit(spec, model, split, results, best)
    except FloatingPointError as error:  # a rate that is too high for this model: a result like others
        diverged = str(error)
    if model.trainable:
        best.load()
    metrics = with_test(results, lambda: tested(model, split["test"], WIDER * spec.training.batch))
    return Fitted(model, split, scaling, record(spec, metrics, diverged, parameters_of(model), device))


def validation_error(record: Record) -> float:
    """By which weights are chosen: the MSE, and the loss of the quantiles where there are any."""
    return record["mse"] + record.get(PINBALL, 0.0)


def fit(spec: Spec, model: Forecaster, split: Mapping[str, Windows], results: Results, best: Best) -> None:
    how = spec.training

    def evaluate(forecaster: Forecaster) -> list[Record]:
        return [{"split": "validation", **score(forecaster, split["validation"], WIDER * how.batch, "validation")}]

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
        losses=lambda model, batch: model(
            batch.history, batch.observed, batch.future, batch.future_observed, **batch.covariates
        ),
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


@torch.no_grad()
def tested(model: Forecaster, windows: Windows, batch: int) -> Record:
    """Means, and MSE and MAE of each window, packed, those of all processes; of many series the mean over one time."""
    model.eval()
    own = window_sums(model, windows, batch, "test")
    sums = torch.cat(distributed.gather(own)).numpy()
    if windows.moments is not None:
        times, which = np.unique(windows.moments, return_inverse=True)
        together = np.zeros((len(times), sums.shape[1]))
        np.add.at(together, which, sums)
        sums = together
    with np.errstate(invalid="ignore"):  # a window without any value has no error
        errors = {name: packed(sums[:, number] / sums[:, 0]) for number, name in ((1, "mse"), (2, "mae"))}
    return {**means_of(own), ERRORS: errors}


CALIBRATED = 1000
"""Held-out windows that conformal widths are taken of, at most; more would be nearly the same ones."""
NUMBERS = 50_000_000
"""Errors that are held at once for that, at most."""


def spaced(windows: Windows, channels: int) -> Tensor:
    """Numbers of windows, evenly spaced, all of them if they are few."""
    count = min(windows.count, CALIBRATED, max(NUMBERS // (windows.horizon * channels), 100))
    return torch.linspace(0, windows.count - 1, count).round().long()


@torch.no_grad()
def calibrated(model: Forecaster, windows: Windows, batch: int) -> None:
    """Give the model conformal widths of the levels for which there are enough windows, of the validation split."""
    model.eval()
    chosen, errors = spaced(windows, model.config.channels), []
    for numbers in chosen.split(batch):
        given = windows.take(numbers)
        point, _, known = forecasts(model, given)
        errors.append((point - given.future).masked_fill(~known, math.nan).cpu())
    levels = [level for level in LEVELS if len(chosen) >= enough_for(level)]
    if levels:
        model.calibrate(levels, conformal_widths(torch.cat(errors), levels))


@torch.no_grad()
def coverage(model: Forecaster, windows: Windows, batch: int) -> dict[str, dict[float, float]]:
    """Kind of interval -> level -> share of the known values of windows that lie within, in percent."""
    model.eval()
    config, inside, count = model.config, Counter[tuple[str, float]](), 0
    widths = getattr(model, "conformal_widths", None)
    has = [round(q, 6) for q in config.quantiles or ()]
    for numbers in spaced(windows, config.channels).split(batch):
        given = windows.take(numbers)
        point, spread, there = forecasts(model, given)
        count += int(there.sum())
        for place, level in enumerate(config.conformal_levels or ()):
            width = widths[place].where(widths[place] >= 0, math.inf) if widths is not None else math.inf
            inside["conformal", level] += int((((point - given.future).abs() <= width) & there).sum())
        if spread is None:
            continue
        for level in quantile_levels(config):
            low, high = (spread[..., has.index(end)] for end in pair(level))
            inside["quantiles", level] += int(((low <= given.future) & (given.future <= high) & there).sum())
    shares: dict[str, dict[float, float]] = {}
    for (kind, level), number in inside.items():
        shares.setdefault(kind, {})[level] = 100 * number / max(count, 1)
    return shares


def record(spec: Spec, metrics: list[Record], diverged: str | None, parameters: int, device: torch.device) -> Record:
    """What a store keeps of a training."""
    validation = [each for each in metrics if each["split"] == "validation"]
    errors = {each["step"]: validation_error(each) for each in validation}
    best = min(validation, key=lambda each: (math.isnan(errors[each["step"]]), errors[each["step"]], each["step"]))
    return {
        **asdict(spec),
        "mse": metrics[-1]["mse"],
        "mae": metrics[-1]["mae"],
        ERRORS: metrics[-1].get(ERRORS),
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


class Outlook(NamedTuple):
    """One channel of a wide file, or one series of a long one: values over dates, those to come NaN where unknown."""

    name: str
    history: Any
    truth: Any
    forecast: Any
    """A frame: the forecast, and the lower and upper ends of its intervals."""


def forecast_figure(found: Sequence[Outlook], title: str, shown: int) -> Any:
    """shown: rows of history."""
    drawn = found[:PANELS]
    drawing = figure(9.0, 1.2 + 1.7 * len(drawn))
    rows = drawing.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, history, truth, forecast) in zip(rows, drawn, strict=True):
        axes.plot(history.index[-shown:], history.iloc[-shown:], color=GREY, linewidth=1.2, label="history")
        if np.isfinite(truth.to_numpy(dtype=float)).any():
            # From the last point of the history, so that the curve does not break.
            whole = require("pandas", "forecast").concat([history.iloc[-1:], truth])
            axes.plot(whole.index, whole, color=BLUE, linewidth=1.2, label="truth")
        for at in range(1, forecast.shape[1], 2):
            ends = [end.where(np.isfinite(end)) for end in (forecast.iloc[:, at], forecast.iloc[:, at + 1])]
            axes.fill_between(forecast.index, *ends, color=VERMILION, alpha=0.18, linewidth=0)
        axes.plot(forecast.index, forecast.iloc[:, 0], color=VERMILION, linewidth=1.6, label="forecast")
        axes.axvline(forecast.index[0], color="0.8", linewidth=0.8, zorder=0)
        axes.set_ylabel(label(name), parse_math=False)
        quiet(axes)
    drawing.align_ylabels()
    rows[0].legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    more = f" (and {len(found) - len(drawn)} more)" if len(found) > len(drawn) else ""
    drawing.suptitle(label(title, 80) + more, fontsize=11, parse_math=False)
    return drawing
