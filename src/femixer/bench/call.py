"""A layer and the sequences it is given: its forward pass and its training step, to be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from femixer.bench.measure import stopwatch


class Call(NamedTuple):
    """function: the layer itself, or the layer compiled; x [B, T, dim] and the gradient of the layer's output."""

    function: Callable[[Tensor], Tensor]
    layer: nn.Module
    x: Tensor
    gradient: Tensor

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(self.x)

    def train(self) -> None:
        self.function(self.x).backward(self.gradient)

    def clear(self) -> None:
        """Drop the gradients, so that every step allocates them anew, as training does."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def train_and_clear(self) -> None:
        self.train()
        self.clear()

    def time_forward(self) -> float:
        return stopwatch(self.forward, self.x.device)

    def time_training(self) -> float:
        seconds = stopwatch(self.train, self.x.device)
        self.clear()
        return seconds
