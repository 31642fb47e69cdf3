"""A prior with one weight per token and channel: its mean, free energy and log of the total weight, along time.

    s_t(i) = exp(key_i + gate_{i+1} + ... + gate_t),   i <= t,   gate <= 0
    log_total_t = log sum_i s_t(i)
    mean_t = sum_i s_t(i) v_i / sum_i s_t(i)
    free_t = log(sum_i s_t(i) exp(beta v_i) / sum_i s_t(i)) / beta

Everything is in log space, so keys, gates and beta v may have any size. Axes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import Operator, wide_dtype
from femixer.kernels.reading import Reading, state_dtype


def _results(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    mean, log_total = (v.new_empty(v.shape, dtype=wide_dtype(v)) for _ in range(2))
    free = mean.new_empty(0) if beta is None else torch.empty_like(mean)
    last = v.new_empty(3, v.shape[0], v.shape[2], dtype=state_dtype(v.device))
    return mean, free, log_total, last, v.new_empty(0)


# The last result is what a backend keeps for its backward.
OPERATOR = Operator(__name__, _results, outputs=5, internal=1)


def channel_scan(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None = None,
    state: Tensor | None = None,
    exclusive: bool = False,
) -> Reading:
    """Mean, free energy and log total [B, T, C], zero at padding, and the state after the last token.

    key, gate, v [B, T, C], keys and gates of zero where they are None; beta [C], None for the mean only; marks [B, T]
    (see femixer.kernels.marks); state of the tokens before: [3, B, C] in `state_dtype` with the log total, mean and
    free energy of the last one, None where there is none. Results are float32 or better, Triton's mean has v's type.

    exclusive: every row reads the tokens before it, decayed by its own gate; where there is none its log total is -inf.
    """
    mean, free, log_total, last, _ = OPERATOR(key, gate, v, beta, marks, state)
    read = Reading(mean, None if beta is None else free, log_total, last)
    return _without_itself(read, gate, marks, state) if exclusive else read


def _without_itself(read: Reading, gate: Tensor | None, marks: Tensor | None, state: Tensor | None) -> Reading:
    """The results of the real token before, in the same segment, or of the state."""
    rows = [read.log_total, read.mean, *([] if read.free is None else [read.free])]
    first = [torch.zeros_like(x[:, :1]) if state is None else state[i, :, None].to(x.dtype) for i, x in enumerate(rows)]
    moved = [torch.cat(pair, 1) for pair in zip(first, rows, strict=True)]
    index = torch.arange(read.mean.shape[1], device=read.mean.device)[None]
    if marks is None:
        log_total, mean, *free = (x[:, :-1] for x in moved)
        nothing = (index == 0) & (state is None)
    else:
        index = F.pad((index + 1).masked_fill(is_padding(marks), 0).cummax(1).values[:, :-1], (1, 0))
        take = index[..., None].expand_as(read.mean)
        log_total, mean, *free = (x.gather(1, take) for x in moved)
        nothing = is_start(marks) | ((index == 0) & (state is None))
    nothing = nothing[..., None]
    log_total = (log_total if gate is None else log_total + gate).masked_fill(nothing, -torch.inf)
    return Reading(mean.masked_fill(nothing, 0), free[0] if free else None, log_total, read.state)


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """All weights of all rows, in float64."""
    key, gate, v, beta, marks, state = arguments
    v = v.double()
    batch, length = v.shape[:2]
    k, g = (torch.zeros_like(v) if x is None else x.double() for x in (key, gate))
    marks = v.new_zeros(batch, length, dtype=torch.int8) if marks is None else marks
    padding, segment = is_padding(marks), is_start(marks).long().cumsum(1)
    until = g.masked_fill(padding[..., None], 0).cumsum(1)
    seen = (segment[:, :, None] == segment[:, None]) & ~padding[:, None]
    seen &= torch.ones(length, length, dtype=torch.bool, device=v.device).tril()
    scores = k[:, None] + until[:, :, None] - until[:, None]  # [B, T, i, C]
    scores = scores.masked_fill(~seen[..., None], -torch.inf)
    values = energies = v[:, None].expand(-1, length, -1, -1)
    if state is not None:  # one more token, before all others
        first = (state[0][:, None] + until).masked_fill((segment > 0)[..., None], -torch.inf)
        scores = torch.cat([first[:, :, None], scores], 2)
        values, energies = (
            torch.cat([x[:, None, None].expand(-1, length, 1, -1), y], 2)
            for x, y in ((state[1], values), (state[2], energies))
        )
    there = ~padding[..., None] & (scores > -torch.inf).any(2)
    scores = torch.where(there[:, :, None], scores, 0)

    def shown(x: Tensor) -> Tensor:
        return torch.where(there, x, 0)

    if scores.shape[2] == 0:
        log_total = mean = free = v
    else:
        log_total, mean = scores.logsumexp(2), (scores.softmax(2) * values).sum(2)
        free = mean
        if beta is not None:
            free = ((scores + beta.double() * energies).logsumexp(2) - log_total) / beta.double()
    rows = [shown(log_total), shown(mean), shown(free) if beta is not None else torch.zeros_like(mean)]
    return rows[1], v.new_empty(0) if beta is None else rows[2], rows[0], _last(rows, padding, state, beta)


def _last(rows: list[Tensor], padding: Tensor, state: Tensor | None, beta: Tensor | None) -> Tensor:
    """Log total, mean and free energy of the last real token, or of the state where there is none."""
    batch, _, channels = rows[0].shape
    if state is None:
        state = rows[0].new_zeros(3, batch, channels)
        state[0] = -torch.inf
    last = []
    for b in range(batch):
        real = (~padding[b]).nonzero().flatten().tolist()
        row = torch.stack([x[b, real[-1]] for x in rows]) if real else state[:, b]
        last.append(row if beta is not None else torch.cat([row[:2], torch.zeros_like(row[2:])]))
    return torch.stack(last, 1)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def drawn(batch: int, length: int, channels: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key, gate, v = scale * torch.randn(3, batch, length, channels)
        return key, -gate.abs(), v, 0.3 + torch.rand(channels)

    def before(batch: int, channels: int) -> Tensor:
        log_total, mean, above = torch.randn(3, batch, channels, dtype=torch.float64)
        return torch.stack([log_total, mean, mean + above.abs()])

    def marked(batch: int, length: int) -> Tensor:
        """Padding anywhere, segments of any length; the first row starts none, the last one ends in padding."""
        random, marks = torch.rand(batch, length), torch.zeros(batch, length, dtype=torch.int8)
        marks[random < 0.25] = PADDING
        marks[1:][random[1:] > 0.85] = START
        marks[-1, -1] = PADDING
        return marks

    key, gate, v, beta = drawn(3, 37, 5)
    short, wide = drawn(2, 3, 7), drawn(2, 29, 3, 40.0)
    nothing = torch.full((3, 2, 7), -torch.inf, dtype=torch.float64)
    nothing[1:] = 0
    return {
        "keys and gates": (key, gate, v, beta, None, None),
        "with marks and state": (key, gate, v, beta, marked(3, 37), before(3, 5)),
        "keys only": (key, None, v, beta, marked(3, 37), None),
        "keys only, no marks": (key, None, v, beta, None, None),
        "gates only": (None, gate, v, beta, None, before(3, 5)),
        "the mean only": (key, gate, v, None, marked(3, 37), before(3, 5)),
        "values only": (None, None, v, None, None, None),
        "any size": (*wide, marked(2, 29), None),
        "one token": (*(x[:, :1] for x in short[:3]), short[3], None, before(2, 7)),
        "an empty state": (*short, None, nothing),
        "padding alone": (*short, torch.full((2, 3), PADDING, dtype=torch.int8), before(2, 7)),
        "nothing at all": (*short, torch.full((2, 3), PADDING, dtype=torch.int8), None),
        "no token": (*(x[:, :0] for x in short[:3]), short[3], None, before(2, 7)),
        "many channels": (*drawn(1, 2, 131), None, None),
    }
