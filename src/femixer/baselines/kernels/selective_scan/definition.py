"""The selective scan by its definition, token by token in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.marks import PADDING, START, is_padding, is_start


def forward(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> tuple[Tensor, ...]:
    rate, step, write, read, x = (part.double() for part in (rate, step, write, read, x))
    h = x.new_zeros(x.shape[0], *rate.shape) if state is None else state.double()
    marks = torch.zeros(x.shape[:2], dtype=torch.int8, device=x.device) if marks is None else marks
    rows = []
    for t in range(x.shape[1]):
        padding, start = (f(marks[:, t])[:, None, None] for f in (is_padding, is_start))
        past = (step[:, t, None] * rate).exp() * torch.where(start, 0, h)
        h = torch.where(padding, h, past + (step[:, t] * x[:, t])[:, None] * write[:, t, :, None])
        rows.append(torch.where(padding[:, 0], 0, (read[:, t, :, None] * h).sum(1)))
    return torch.stack(rows, 1), h, x.new_empty(0)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def drawn(batch: int, length: int, channels: int, modes: int) -> list[Tensor]:
        """Everything but marks and state."""
        rate, step = -torch.randn(modes, channels).exp(), torch.randn(batch, length, channels).exp()
        write, read = torch.randn(2, batch, length, modes)
        return [rate, step, write, read, torch.randn(batch, length, channels)]

    random, marks = torch.rand(3, 71), torch.zeros(3, 71, dtype=torch.int8)
    marks[random < 0.2] = PADDING
    marks[1:][random[1:] > 0.9] = START
    return {
        "from the beginning": (*drawn(2, 37, 5, 3), None, None),
        "with marks and state": (*drawn(3, 71, 67, 3), marks, torch.randn(3, 3, 67)),
        "longer than a block": (*drawn(1, 293, 2, 2), None, torch.randn(1, 2, 2)),
        "one token": (*drawn(2, 1, 3, 5), None, torch.randn(2, 5, 3)),
    }
