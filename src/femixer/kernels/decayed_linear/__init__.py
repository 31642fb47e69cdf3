"""Decayed linear attention with a free-energy read.

    weight of token i at t:  s_t(i) = sum_m q_t[m] k_i[m] exp(gate_{i+1}[m] + ... + gate_t[m]),   q, k >= 0, gate <= 0
    p_t = s_t / sum_i s_t(i),   mean = E_p[v],   free = log E_p[exp(beta v)] / beta,   log_total = log sum_i s_t(i)

Axes: B batch, T tokens, H heads, G key/value heads, E key channels, D value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.operator import Operator, wide_dtype
from femixer.kernels.reading import Reading, state_dtype


class FastWeights(NamedTuple):
    """State: decayed sums [B, G, E, 2 D + 1 or D + 1] of k_i (v_i, 1, exp(beta v_i - top)), and top [B, G, D].

    In the type of `state_dtype`. The largest exponential of each value channel is one; top is a constant for gradients.
    """

    sums: Tensor
    top: Tensor


def _results(
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
    """mean, free, log_total, the state's sums and top, and which heads [B, H] were read again (for the backward)."""
    batch, _, heads, channels = q.shape
    groups, width = v.shape[2:]
    mean = v.new_empty(*q.shape[:3], width, dtype=wide_dtype(v))
    free = mean.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    columns = width + 1 if beta is None else 2 * width + 1
    wide = state_dtype(v.device)
    last = v.new_empty((batch, groups, channels, columns) if keep else 0, dtype=wide)
    last_top = v.new_empty((batch, groups, width) if keep else 0, dtype=wide)
    return mean, free, mean.new_empty(q.shape[:3]), last, last_top, v.new_empty(batch, heads, dtype=torch.bool)


OPERATOR = Operator(__name__, _results, outputs=6, internal=1)


def decayed_linear_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None = None,
    state: FastWeights | None = None,
    exclusive: bool = False,
    keep: bool = True,
) -> Reading:
    """mean, free [B, T, H, D] (free None without beta); log_total [B, T, H]; state after the last token, if kept. In
    float32 or better.

    q [B, T, H, E]; k [B, T, G, E]; gate [B, T, G, E or 1]; v [B, T, G, D]; beta [G, D]; marks [B, T], see
    femixer.kernels.marks. exclusive: a token reads those before it, decayed by its own gate. Where a token sees
    nothing, and at padding, mean and free are zero and log_total is -inf.
    """
    sums, top = (None, None) if state is None else state
    mean, free, log_total, last, last_top, _ = OPERATOR(q, k, gate, v, beta, marks, sums, top, exclusive, keep)
    return Reading(mean, None if beta is None else free, log_total, FastWeights(last, last_top) if keep else None)
