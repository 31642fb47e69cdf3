"""An operator for the tests of the frame: y = (x weight + bias)^power, its last row, and what a backward wants kept."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import Operator


def _results(
    x: Tensor, weight: Tensor, bias: Tensor | None, power: int, shift: float, flip: bool
) -> tuple[Tensor, ...]:
    y = x.new_empty(*x.shape[:2], weight.shape[1])
    return y, y.new_empty(x.shape[0], weight.shape[1]), torch.empty_like(y)


OPERATOR = Operator(__name__, _results, 3, internal=1)
