"""The scan per channel by its definition: all weights of all rows, in float64."""

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.marks import PADDING, START, is_padding, is_start


def forward(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
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
