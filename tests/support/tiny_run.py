"""A training run of a few milliseconds for the tests, and what kills it with -9 wherever it hurts."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from femixer.training import (
    EngineOptions,
    Fit,
    Part,
    Results,
    RunOptions,
    TrainOptions,
    adamw,
    cosine,
    generator,
    train,
)
from femixer.training.results import MODEL, new_model


@dataclass(frozen=True)
class Tiny:
    steps: int = 7
    evaluate_every: int = 3
    lr: float = 0.1
    seed: int = 0


class Crash(Exception):
    """As if the process had died."""


def crash_at(step: int) -> Callable[[int], None]:
    """For `each_batch` of `tiny_run`."""

    def each_batch(now: int) -> None:
        if now == step:
            raise Crash

    return each_batch


ELABORATE: dict[str, Any] = {
    "schedule": cosine(7, 2, 0.1),
    "clip": 0.1,
    "log_every": 2,
    "tokens": 11,
    "samples": lambda model: [{"text": f"{torch.rand(()).item()} [bold]"}],
    "engine": EngineOptions(accumulate=3),
}
"""Of `Fit` and `TrainOptions`, so that all of them is used."""


def tiny_run(
    folder: Path,
    experiment: Tiny | None = None,
    each_batch: Callable[[int], None] = lambda step: None,
    arguments: dict[str, Any] | None = None,
    finish: bool = False,
    **options: Any,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Fit a line, with dropout and Adam's moments to get wrong. Returns the records (without times) and the weights.

    finish: save the model and write the table.
    """
    experiment = experiment or Tiny()
    run = RunOptions(folder, **options)
    run.apply()
    results = Results("tiny", experiment, run)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator(experiment.seed, "weights", *parameter.shape))

    def batch(step: int, part: Part) -> Tensor:
        each_batch(step)
        return torch.randn(11, 3, generator=generator(experiment.seed, "train", step))[part.rows(11)]

    def error(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x)[:, 0] - x.sum(1)).square().sum()

    held_out = torch.randn(13, 3, generator=generator(experiment.seed, "validation"))
    fit = Fit(
        model=model,
        optimizer=lambda model: adamw(model, experiment.lr),
        batch=batch,
        losses=lambda model, x: {"line": error(model, x)},
        items=len,
        evaluate=lambda model: [{"model": "line", "mse": error(model, held_out).item() / 13}],
    )
    how = TrainOptions(experiment.steps, experiment.evaluate_every, experiment.seed)
    of_fit = {name: value for name, value in (arguments or {}).items() if hasattr(fit, name)}
    of_options = {name: value for name, value in (arguments or {}).items() if name not in of_fit}
    train(replace(fit, **of_fit), replace(how, **of_options), results)
    records = results.metrics()
    if (results.folder / "samples.jsonl").exists():
        records += map(json.loads, (results.folder / "samples.jsonl").read_text().splitlines())
    times = ("seconds", "tokens_per_second")
    records = [{name: value for name, value in record.items() if name not in times} for record in records]
    if finish and not results.finished:
        with new_model(results.folder / MODEL) as partial:
            partial.mkdir()
            (partial / "config.json").write_text(json.dumps({"model_type": "line", "seed": experiment.seed}))
            (partial / "model.safetensors").write_bytes(model[0].weight.detach().numpy().tobytes())
        results.finish(f"seed {experiment.seed}\n")
    return records, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: Any, b: Any) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in b[1])


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a fork and return its wait status."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at(moment: int) -> None:
    """Make this process end by SIGKILL just before it changes or syncs the disk for the `moment`-th time."""
    moments = iter(range(1, moment + 1))

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return wrapped

    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))


def without_waiting() -> None:
    """A process that dies takes nothing away from what the system has still to write, so nobody has to wait for it."""
    os.fsync = lambda descriptor: None


def crash_everywhere(folder: Path) -> None:
    """Kill a run before its 1st, 2nd, ... touch of the disk, resume it, compare. Prints how many there were.

    In a process of its own, where nobody waits for the disk from now on.
    """
    torch.set_num_threads(1)
    without_waiting()
    experiment = Tiny(steps=5)

    def elaborate(run: Path, **options: Any) -> Any:
        return tiny_run(run, experiment, arguments=ELABORATE, save_every=2, **options)

    expected = elaborate(folder / "undisturbed")
    moment = 0
    while True:
        moment += 1
        run = folder / f"killed-{moment}"

        def killed(run: Path = run, moment: int = moment) -> None:
            kill_at(moment)
            elaborate(run)

        status = in_child(killed)
        if status == 0:  # it has fewer moments than that
            print(moment - 1)
            return
        assert os.WIFSIGNALED(status), f"the run that should die at moment {moment} failed instead"
        if (run / "metrics.jsonl").exists() and moment % 2:  # the end of a line that never reached the disk
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"model": "li')
        resumed = elaborate(run, resume=True)
        assert same(resumed, expected), f"killed at moment {moment}, resumed, and the result differs"
        assert not [*run.rglob("*.partial")], f"moment {moment} left temporary files"
