"""A prior with one weight per token and channel: its mean, free energy and log of the total weight, along time.

    s_t(i) = exp(key_i + gate_{i+1} + ... + gate_t),   i <= t,   gate <= 0
    log_total_t = log sum_i s_t(i)
    mean_t = sum_i s_t(i) v_i / sum_i s_t(i)
    free_t = log(sum_i s_t(i) exp(beta v_i) / sum_i s_t(i)) / beta

Everything is in log space, so keys, gates and beta v may have any size. Axes: B batch, T tokens, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
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
    free energy of the last one, None where there is none. Results have at least float32.

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
