"""Training a forecaster: to the best validation MSE, whose weights are then scored on the test split, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from femixer.models.forecast import Forecaster
from femixer.models.parameters import parameters_of
from femixer.tasks.forecast.batches import Batches
from femixer.tasks.forecast.experiment import Spec
from femixer.tasks.forecast.forecaster import build_model
from femixer.tasks.forecast.scoring import score
from femixer.tasks.forecast.source import Series
from femixer.tasks.forecast.windows import Windows, windows
from femixer.training import EngineOptions, Results, adamw, distributed, train
from femixer.training.best import Best
from femixer.training.results import Record, environment
from femixer.training.schedule import one_cycle

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
    batches = Batches(split["train"], how.batch, spec.seed)
    steps = how.epochs * batches.per_epoch
    train(
        model,
        lambda model: adamw(model, how.lr, how.weight_decay, BETAS, fused=True),
        batch=batches,
        losses=lambda model, batch: model(batch.history, batch.observed, batch.future, batch.future_observed),
        items=lambda batch: len(batch.history),
        evaluate=evaluate,
        results=results,
        steps=steps,
        evaluate_every=batches.per_epoch,
        seed=spec.seed,
        schedule=one_cycle(steps),
        clip=CLIP,
        log_every=batches.per_epoch,
        engine=EngineOptions(precision=how.precision),
        enough=best.enough,
    )


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
        "model": spec.model,
        "dataset": spec.dataset,
        "horizon": spec.horizon,
        "lookback": spec.lookback,
        "seed": spec.seed,
        "mse": metrics[-1]["mse"],
        "mae": metrics[-1]["mae"],
        "validation_mse": best["mse"],
        "best_step": best["step"],
        "steps": validation[-1]["step"],
        "seconds": metrics[-1]["seconds"],
        "parameter_count": parameters,
        "evaluations": [{name: each[name] for name in ("step", "mse", "mae")} for each in validation],
        "diverged": diverged,
        "fingerprint": spec.fingerprint,
        "season": spec.season,
        "fields": {**spec.fields},
        "training": asdict(spec.training),
        "environment": {**environment(), "device": device.type},
    }
