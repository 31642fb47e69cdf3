"""The gated softmax read as the read and the gates, one operator after the other."""

from __future__ import annotations

from torch import Tensor

from femixer.kernels.gates import gated
from femixer.kernels.softmax import reading_dtype, softmax_read

DIFFERENTIABLE = True


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    causal: bool,
    window: int | None,
    eps: float,
) -> tuple[Tensor, ...]:
    dtype = reading_dtype(v, beta)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    beta, lam, gate = (None if x is None else x.to(dtype) for x in (beta, lam, gate))
    segments = None if segments_q is None or segments_k is None else (segments_q, segments_k)
    mean, free = softmax_read(q, k, v, beta, causal=causal, window=window, bias=bias, segments=segments)
    if free is None or lam is None:
        read = mean if free is None else free
        return (read if gate is None else gated(read, None, None, gate, eps),)
    return (gated(mean, free, lam, gate, eps),)
