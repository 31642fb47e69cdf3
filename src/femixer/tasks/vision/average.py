"""The exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

KEY = "average"


def averaging(optimizer: Optimizer, decay: float) -> Optimizer:
    """After every step: average = decay * average + (1 - decay) * weights, from the weights of the first step on.

    It is kept in the optimizer's state, with which it is saved, restored and sharded.
    """

    @torch.no_grad()
    def update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[parameter]
            if KEY in state:
                state[KEY].lerp_(parameter, 1 - decay)
            else:
                state[KEY] = parameter.detach().clone()

    optimizer.register_step_post_hook(update)
    return optimizer


@contextmanager
def averaged(model: nn.Module, optimizer: Optimizer) -> Iterator[nn.Module]:
    """The model with the averaged weights in it, as long as this lasts."""
    own: dict[nn.Parameter, Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if KEY in optimizer.state.get(parameter, {}):
                own[parameter] = parameter.detach().clone()
                parameter.copy_(optimizer.state[parameter][KEY])
    try:
        yield model
    finally:
        with torch.no_grad():
            for parameter, value in own.items():
                parameter.copy_(value)
