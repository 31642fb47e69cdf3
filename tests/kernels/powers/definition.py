from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, power: int, shift: float, flip: bool) -> tuple[Tensor, ...]:
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
