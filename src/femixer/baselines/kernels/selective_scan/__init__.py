"""The selective scan: diagonal state spaces per channel whose step, write and read depend on the token (Mamba).

    h_t[n] = exp(step_t rate[n]) h_{t-1}[n] + step_t write_t[n] x_t,    y_t = sum_n read_t[n] h_t[n],    rate <= 0

write and read have any sign and nothing is normalized; for positive weights and their mean see the state-space read of
femixer.kernels.

Axes: B batch, T tokens, C channels, N modes per channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import Operator
from femixer.kernels.recurrence import linear_recurrence


def _results(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> tuple[Tensor, ...]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[0], *rate.shape), kept_states(rate, x)


OPERATOR = Operator(__name__, _results, outputs=3, internal=1)


def selective_scan(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y [B, T, C], zero at padding, and the state after the last token [B, N, C]), in float32 at least.

    rate [N, C]; step, x [B, T, C]; write, read [B, T, N]; marks [B, T] (see femixer.kernels.marks); state [B, N, C].
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    rate, step, write, read, x = (part.to(dtype) for part in (rate, step, write, read, x))
    y, last, _ = OPERATOR(rate, step, write, read, x, marks, state)
    return y, last


BLOCK = 256  # tokens whose modes are computed at a time
ROWS = 32  # tokens between states that a compiled loop keeps for its backward


def kept_states(rate: Tensor, x: Tensor) -> Tensor:
    """An empty tensor [B, T / ROWS, N, C] for those states."""
    return x.new_empty(x.shape[0], -(-x.shape[1] // ROWS), *rate.shape)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """In torch's operations, some tokens at a time: all modes of all tokens are N times the input."""
    rate, step, write, read, x, marks, state = arguments
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


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """Token by token in float64."""
    rate, step, write, read, x, marks, state = arguments
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
