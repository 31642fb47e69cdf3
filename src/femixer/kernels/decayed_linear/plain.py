"""Decayed linear attention in torch's operations; how is said in plain_blocks.py. Its backward has the same parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.decayed_linear.plain_blocks import (
    arranged,
    by_group,
    pairs_of,
    plan,
    read_level,
    read_past,
    readers_of,
    states_of,
)
from femixer.kernels.decayed_linear.plain_gradients import backward as backward
from femixer.kernels.marks import is_padding
from femixer.kernels.operator import wide_dtype
from femixer.kernels.reading import state_dtype


def forward(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor | None,
    top: Tensor | None,
    exclusive: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    (batch, length, heads, _), (groups, width), dtype = q.shape, v.shape[2:], wide_dtype(v)
    sizes, radix, chunk, padded = plan(length, gate)
    tokens = arranged(k, gate, v, beta, marks, padded, chunk)
    q = by_group(q, groups, padded)
    total, energies = None, []
    for size in sizes:
        total, energy = read_level(pairs_of(q, tokens, size, radix, size == 1 and not exclusive), total)
        energies.append(energy)
    assert total is not None
    last, last_top = (q.new_empty(0, dtype=state_dtype(q.device)) for _ in range(2))
    if sums is not None or keep or padded > chunk:
        states, _ = states_of(tokens.grouped(-1, chunk), sums, top)
        total, energy = read_past(readers_of(q, tokens, chunk), states, total)
        energies.append(energy)
        if keep:
            last, last_top = (x.to(state_dtype(x.device)) for x in states.last(width)[:2])
    if marks is not None:
        padding = F.pad(is_padding(marks), (0, padded - length))[:, None, None, :, None]
        total = total.masked_fill(padding, 0)
    weight = total[..., width:]
    empty = weight <= 0
    weight = weight.masked_fill(empty, 1)
    mean = total[..., :width] / weight
    log_total = weight.log()

    def rows(x: Tensor) -> Tensor:
        return x[:, :, :, :length].permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)

    if beta is None:
        free = mean.new_empty(0, 0, 0, 0, dtype=dtype)
    else:
        energy = torch.stack(energies).logsumexp(0) - log_total  # type: ignore[arg-type]
        free = torch.maximum(energy / beta.to(energy.dtype)[:, None, None], mean)  # of nothing the mean, which is zero
        free = rows(free if marks is None else free.masked_fill(empty, 0))
    exact = q.new_zeros(batch, heads, dtype=torch.bool)
    return rows(mean), free, rows(log_total.masked_fill(empty, -torch.inf))[..., 0], last, last_top, exact
