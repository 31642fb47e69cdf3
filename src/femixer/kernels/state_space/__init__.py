"""The state-space read: mean and free energy under positive weights that diagonal state spaces give, per channel.

    weight of token i at t:  sum_n read_t[n] exp(rate[n] (step_{i+1} + ... + step_t)) write_i[n] step_i,   rate <= 0

    mean = sum_i w_i v_i / sum_i w_i,   free = log(sum_i w_i exp(beta v_i) / sum_i w_i) / beta
    log_total = log sum_i w_i

Axes: B batch, T tokens, C channels, N modes per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.operator import Operator, wide_dtype
from femixer.kernels.reading import Reading, state_dtype


class System(NamedTuple):
    """rate [N, C] log decays per unit of step; step [B, T, C] >= 0 and write [B, T, N] >= 0, None for ones.

    Modes are read with read [B, T, N] (Mamba), or with one weight [N, C] (a time-invariant state space). With skip [C]
    a token reads itself with that weight instead of through the state.
    """

    rate: Tensor
    step: Tensor | None = None
    write: Tensor | None = None
    read: Tensor | None = None
    weight: Tensor | None = None
    skip: Tensor | None = None


class Modes(NamedTuple):
    """State: sums [B, 3, N, C] of 1, v and exp(beta v - top) per mode, and top [B, C], in `state_dtype`.

    top is the largest exponent so far as it decays with the slowest mode, -inf before the first token.
    """

    sums: Tensor
    top: Tensor

    @classmethod
    def empty(cls, rate: Tensor, v: Tensor) -> Modes:
        dtype = state_dtype(v.device)
        sums = v.new_zeros(v.shape[0], 3, *rate.shape, dtype=dtype)
        return cls(sums, v.new_full((v.shape[0], v.shape[2]), -torch.inf, dtype=dtype))


def _results(
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool,
) -> tuple[Tensor, ...]:
    mean, log_total = (v.new_empty(v.shape, dtype=wide_dtype(v)) for _ in range(2))
    free = mean.new_empty((0, 0, 0) if beta is None else v.shape)
    return mean, free, log_total, sums.new_empty(sums.shape), top.new_empty(top.shape)


OPERATOR = Operator(__name__, _results, 5)


def state_space_read(
    system: System,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Modes,
    exclusive: bool = False,
) -> Reading:
    """v [B, T, C]; beta [C]; marks [B, T]. exclusive: a token reads those before it, decayed by its own step."""
    mean, free, log_total, *last = OPERATOR(*system, v, beta, marks, *state, exclusive)
    return Reading(mean, None if beta is None else free, log_total, Modes(*last))
