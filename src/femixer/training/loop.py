"""The training loop of all experiments."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from femixer.options import check
from femixer.training import checkpoint
from femixer.training.checkpoint import Position
from femixer.training.interrupt import Interrupted, StopRequest
from femixer.training.progress import display
from femixer.training.results import CHECKPOINTS, Record, Results
from femixer.training.seeding import derive

Batch = TypeVar("Batch")


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    batch: Callable[[int], Batch],
    losses: Callable[[Any, Batch], Mapping[str, Tensor]],
    evaluate: Callable[[Any], Iterable[Record]],
    results: Results,
    steps: int,
    evaluate_every: int,
    seed: int,
) -> None:
    """Minimise the sum of the losses for `steps` steps, from the newest checkpoint in `results` if there is one.

    batch:     step -> batch, a pure function of the step, so that a resumed run sees what it would have seen.
    losses:    (model, batch) -> named scalars; their sum is minimised, the names are for the progress bar.
    evaluate:  model -> records, run without gradients in evaluation mode at step 0, every `evaluate_every` steps and
               at the end. Records get `step` and `seconds` and go to metrics.jsonl; then a checkpoint is saved.
    seed:      of whatever the model itself draws in training (dropout), anew for every step for the same reason.

    A run that was stopped, even by kill -9, and resumed with the same options ends with the same weights and records.
    Ctrl-C and SIGTERM finish the step, save it and raise `Interrupted`.
    """
    check(steps > 0, "steps", steps, "a whole number above 0")
    check(evaluate_every > 0, "evaluate_every", evaluate_every, "a whole number above 0")
    checkpoints = results.folder / CHECKPOINTS
    position = checkpoint.restore(checkpoints, model, optimizer)
    results.rewind(position.step if position.step > 0 else -1)
    clock = Clock(position.seconds)

    with StopRequest() as stop, display(position.step, steps) as shown:

        def record(step: int) -> None:
            at = {"step": step, "seconds": round(clock.seconds(), 3)}
            records = [{**record, **at} for record in evaluated(model, evaluate)]
            results.append(records)
            shown.evaluated(step, records)

        if position.step == 0:
            record(0)
        model.train()
        for step in range(position.step + 1, steps + 1):
            torch.manual_seed(derive(seed, "step", step))
            parts = losses(model, batch(step))
            total = torch.stack([*parts.values()]).sum()
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            shown.stepped(step, parts)
            due = step % evaluate_every == 0 or step == steps
            if due:
                if not math.isfinite(loss := total.item()):
                    raise FloatingPointError(f"the loss is {loss} at step {step}; a smaller learning rate may help")
                record(step)
            if due or stop.requested:
                checkpoint.save(checkpoints, model, optimizer, Position(step, clock.seconds()))
            if stop.requested:
                raise Interrupted(step, steps)


def evaluated(model: nn.Module, evaluate: Callable[[Any], Iterable[Record]]) -> list[Record]:
    model.eval()
    with torch.no_grad():
        records = [*evaluate(model)]
    model.train()
    return records


class Clock:
    """Seconds of training, counted on from those before the run was resumed."""

    def __init__(self, before: float) -> None:
        self.origin = time.monotonic() - before

    def seconds(self) -> float:
        return time.monotonic() - self.origin
