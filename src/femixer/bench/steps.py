"""Training steps of whole models, and their cost as `femixer bench vision` and `forecast` write it to JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from femixer.bench.measure import Spread, Timing, stopwatch, timed
from femixer.bench.options import BenchOptions
from femixer.bench.report import Report as BenchReport
from femixer.models.named import parameters_of
from femixer.training.optimizer import adamw


class Training(NamedTuple):
    """A model that is trained while the clock runs.

    call: the model itself, or the model compiled; batch: its arguments, the same in every step; loss: of its output.
    """

    call: Callable[..., Any]
    optimizer: Optimizer
    batch: Mapping[str, Any]
    loss: Callable[[Any], Tensor]
    parameters: int
    device: torch.device

    @classmethod
    def start(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any],
        compiled: bool = False,
        loss: Callable[[Any], Tensor] = lambda output: output.loss,
    ) -> Training:
        call = torch.compile(model.train(), dynamic=False) if compiled else model.train()
        device = next(model.parameters()).device
        return cls(call, adamw(model, learning_rate=1e-4, fused=True), batch, loss, parameters_of(model), device)

    def step(self) -> None:
        """Forward, backward and a step of AdamW."""
        self.loss(self.call(**self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def time(self) -> float:
        return stopwatch(self.step, self.device)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step, and their ratio to the rival's of the same round.

    name: as the table shows it; key: as it was asked for. samples: seconds, one per round.
    """

    name: str
    key: str
    parameters: int
    seconds: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, name: str, key: str, parameters: int, samples: Sequence[float], rival: Sequence[float]) -> StepCost:
        return cls(name, key, parameters, **vars(Timing.of(samples, rival)))


@dataclass(frozen=True)
class Report(BenchReport):
    training: list[StepCost]


def race_of_steps(
    field: Mapping[str, Training], name: Callable[[str], str], rival: str, options: BenchOptions
) -> dict[str, Sequence[Any]]:
    """The models by key, one step each in every round; name: what the table calls a key."""
    seconds = timed("training", {key: training.time for key, training in field.items()}, options)
    costs = [
        StepCost.of(name(key), key, training.parameters, seconds[key], seconds[rival])
        for key, training in field.items()
    ]
    return {"training": costs}
