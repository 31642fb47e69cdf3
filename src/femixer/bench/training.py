"""A model that is trained while the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from femixer.bench.measure import stopwatch
from femixer.models.parameters import parameters_of
from femixer.training.optimizer import adamw

Self = TypeVar("Self", bound="Training")


class Training(NamedTuple):
    """call: the model itself, or the model compiled; batch: its arguments, the same in every step."""

    call: Callable[..., Any]
    optimizer: Optimizer
    batch: Mapping[str, Any]
    parameters: int
    device: torch.device

    @classmethod
    def start(cls: type[Self], model: nn.Module, batch: Mapping[str, Any], compiled: bool) -> Self:
        call = torch.compile(model.train(), dynamic=False) if compiled else model.train()
        device = next(model.parameters()).device
        return cls(call, adamw(model, learning_rate=1e-4, fused=True), batch, parameters_of(model), device)

    def step(self) -> None:
        """Forward, backward and a step of AdamW."""
        self.call(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def time(self) -> float:
        return stopwatch(self.step, self.device)
