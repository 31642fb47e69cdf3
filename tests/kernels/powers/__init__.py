"""An operator for the tests of the frame: y = (x weight + bias)^power, its last row, and what a backward wants kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import Operator


def _results(
    x: Tensor, weight: Tensor, bias: Tensor | None, power: int, shift: float, flip: bool
) -> tuple[Tensor, ...]:
    y = x.new_empty(*x.shape[:2], weight.shape[1])
    return y, y.new_empty(x.shape[0], weight.shape[1]), torch.empty_like(y)


OPERATOR = Operator(__name__, _results, 3, internal=1)


def definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, power: int, shift: float, flip: bool
) -> tuple[Tensor, ...]:
    inner = x.double() @ weight.double()
    inner = inner if bias is None else inner + bias.double()
    y = inner**power + shift
    y = y.flip(1) if flip else y
    return y, y[:, -1], inner


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 3), torch.randn(3, 7), torch.randn(7)
    return {
        "all": (x, weight, bias, 3, 0.5, True),
        "no bias": (x, weight, None, 2, 0.0, False),
        "one row": (x[:, :1], weight, bias, 1, -1.0, True),
    }
