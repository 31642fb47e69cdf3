"""A normalized read under weights that are not normalized, of total w = exp(log_total):

mean -> w mean = sum_i w_i v_i,   free -> free + log(w) / beta = log(sum_i w_i exp(beta v_i)) / beta
"""

from __future__ import annotations

from torch import Tensor

from femixer.kernels.operator import Operator


def _results(mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    return mean.new_empty(mean.shape), mean.new_empty(0 if free is None else mean.shape)


OPERATOR = Operator(__name__, _results, outputs=2, fusible=True)


def unnormalized(
    mean: Tensor, free: Tensor | None, log_total: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """mean, free and log_total [B, T, H, D]; beta [H, D]; free and beta come together."""
    mean, energy = OPERATOR(mean, free, log_total, beta)
    return mean, None if free is None else energy
