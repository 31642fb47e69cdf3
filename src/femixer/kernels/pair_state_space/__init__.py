"""The read over pairs (i, k) of token and input channel of a head, weighed by a diagonal state space per head.

    weight of the pair (i, k) at t for output channel j:
        sum_n gather[j, n] read_t[n] exp(gate_{i+1}[n] + ... + gate_t[n]) write_i[n] spread[n, k],   gate <= 0

    mean = sum w v / sum w,   free = log(sum w exp(beta v) / sum w) / beta,   log_total = log sum w,   sums over i and k

Axes: B batch, T tokens, H heads, D channels of a head, N modes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.operator import Operator, wide_dtype
from femixer.kernels.reading import Reading, state_dtype


class PairSystem(NamedTuple):
    """gate [B, T, H, N] log decays; write, read [B, T, N]; spread [H, N, D] over input channels; gather [H, D, N]."""

    gate: Tensor
    write: Tensor
    read: Tensor
    spread: Tensor
    gather: Tensor


class PairSums(NamedTuple):
    """State: sums [B, 3, H, N] of 1, v and exp(beta v - top) over pairs, and top [B, H], in `state_dtype`.

    top is the largest exponent so far as it decays with the slowest mode, -inf before the first token.
    """

    sums: Tensor
    top: Tensor

    @classmethod
    def empty(cls, gate: Tensor) -> PairSums:
        batch, _, heads, modes = gate.shape
        dtype = state_dtype(gate.device)
        sums = gate.new_zeros(batch, 3, heads, modes, dtype=dtype)
        return cls(sums, gate.new_full((batch, heads), -torch.inf, dtype=dtype))


def _results(
    gate: Tensor,
    write: Tensor,
    read: Tensor,
    spread: Tensor,
    gather: Tensor,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, ...]:
    mean, log_total = (v.new_empty(v.shape, dtype=wide_dtype(v)) for _ in range(2))
    free = mean.new_empty((0, 0, 0, 0) if beta is None else v.shape)
    return mean, free, log_total, sums.new_empty(sums.shape), top.new_empty(top.shape)


OPERATOR = Operator(__name__, _results, 5)


def pair_state_space_read(
    system: PairSystem,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: PairSums,
    exclusive: bool = False,
) -> Reading:
    """v [B, T, H, D]; beta [H]: a head's channels compete, so they share one temperature; marks [B, T].

    exclusive: a token reads those before it, decayed by its own gate.
    """
    mean, free, log_total, *last = OPERATOR(*system, v, beta, marks, *state, exclusive)
    return Reading(mean, None if beta is None else free, log_total, PairSums(*last))
