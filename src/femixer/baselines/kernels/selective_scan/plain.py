"""The selective scan in torch's operations, some tokens at a time: all modes of all tokens are N times the input."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.recurrence import linear_recurrence

BLOCK = 256  # tokens whose modes are computed at a time
ROWS = 32  # tokens between states that a compiled loop keeps for its backward


def kept_states(rate: Tensor, x: Tensor) -> Tensor:
    """An empty tensor [B, T / ROWS, N, C] for those states."""
    return x.new_empty(x.shape[0], -(-x.shape[1] // ROWS), *rate.shape)


def forward(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> tuple[Tensor, ...]:
    h = x.new_zeros(x.shape[0], *rate.shape) if state is None else state.to(x.dtype)
    rows = []
    for start in range(0, x.shape[1], BLOCK):
        d, u, b, c = (part[:, start : start + BLOCK] for part in (step, x, write, read))
        log_decay, inputs = d[:, :, None] * rate, (d * u)[:, :, None] * b[..., None]
        mark = None if marks is None else marks[:, start : start + BLOCK, None, None]
        if mark is not None:
            log_decay = log_decay.masked_fill(is_padding(mark), 0).masked_fill(is_start(mark), -torch.inf)
            inputs = inputs.masked_fill(is_padding(mark), 0)
        modes = linear_recurrence(log_decay.exp().flatten(2), inputs.flatten(2), h.flatten(1)).unflatten(2, rate.shape)
        h, y = modes[:, -1], (modes * c[..., None]).sum(2)
        rows.append(y if mark is None else y.masked_fill(is_padding(mark)[..., 0], 0))
    # The backward runs this again and needs no states.
    return torch.cat(rows, 1), h.clone(), kept_states(rate, x)
