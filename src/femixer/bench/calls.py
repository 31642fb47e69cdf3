"""What the clock runs around: a layer on a sequence, its training step, and a layer that goes on token by token."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.bench.cost import held_bytes
from femixer.bench.measure import stopwatch
from femixer.bench.options import MixerOptions


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


class Decoder(NamedTuple):
    """A layer and its state after a context. The state is never continued twice: that would copy a cache.

    state_bytes: of one sequence, after the context; grows: whether one more token made it larger.
    """

    layer: nn.Module
    state: Any
    tokens: Tensor  # [steps, B, 1, dim]
    state_bytes: float
    grows: bool

    @classmethod
    def after(cls, layer: nn.Module, context: int, batch: int, options: MixerOptions) -> Decoder:
        prompt = torch.randn(batch, context, options.dim, **options.tensors)
        tokens = torch.randn(options.decode_steps, batch, 1, options.dim, **options.tensors)
        with torch.inference_mode():
            _, state = layer(prompt, return_state=True)
            size = held_bytes(state)
            # A cache gets room to grow with its first new token, which therefore costs more than the others.
            _, state = layer(tokens[0], state=state, return_state=True)
        return cls(layer, state, tokens, size / batch, held_bytes(state) > size)

    def at(self, position: int) -> Decoder:
        """The same as if `position` tokens had been seen: for a state of FEM that does not grow with them."""
        past = self.state.past._replace(seen=position)
        return self._replace(state=dataclasses.replace(self.state, past=past))

    def time(self) -> float:
        """Seconds per token."""
        with torch.inference_mode():
            state = copy.deepcopy(self.state)

            def steps() -> None:
                nonlocal state
                for token in self.tokens:
                    _, state = self.layer(token, state=state, return_state=True)

            return stopwatch(steps, self.tokens.device) / len(self.tokens)
