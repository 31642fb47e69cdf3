"""The selective scan: diagonal state spaces per channel whose step, write and read depend on the token (Mamba).

    h_t[n] = exp(step_t rate[n]) h_{t-1}[n] + step_t write_t[n] x_t,    y_t = sum_n read_t[n] h_t[n],    rate <= 0

write and read have any sign and nothing is normalized; for positive weights and their mean see the state-space read of
femixer.kernels.

Axes: B batch, T tokens, C channels, N modes per channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.baselines.kernels.selective_scan.plain import kept_states
from femixer.kernels.operator import Operator


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
