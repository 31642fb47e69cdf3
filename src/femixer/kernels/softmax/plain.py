"""The softmax read by torch's attention, on any device.

On a CPU the result is exact at any range: heads whose sums are doubtful are read again in float64. Elsewhere, and under
compilers and torch.func, nothing is asked of the device: there is one shift per channel and sequence, its largest value
`top`, and F is within 1e-5 max(1, |F|) where

    beta (top - F) <= 60  (float32),   beta >= 0.1 or beta (top - bottom) <= 2,   top - F <= 40 max(1, |F|).

`top` is taken over all keys of the sequence, also those that a row does not see. Beyond the first bound F is mu, so
that mu <= F <= max holds and results and gradients are finite everywhere.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from femixer.kernels import streams
from femixer.kernels.softmax import one_pass
from femixer.kernels.softmax.visibility import Visibility


def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *seen, scale = rest
    return one_pass.forward(q, k, v, beta, Visibility(*seen), scale, streams)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    return one_pass.backward(grads, arguments, results, needed, streams)
