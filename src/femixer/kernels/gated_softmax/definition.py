"""The gated softmax read by its definition, in float64: the definitions of the read and of the gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.gates import definition as gates
from femixer.kernels.softmax import definition as read


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
    given = bias, segments_q, segments_k, causal, window, q.shape[3] ** -0.5
    mean, free = read.forward(q, k, v, beta, *given)
    if beta is None or lam is None:
        return gates.forward(mean if beta is None else free, None, None, gate, eps)
    return gates.forward(mean, free, lam, gate, eps)


def examples() -> dict[str, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def example(
        size: float = 1.0, inverse: float | None = 1.9, *, length: int = 71, causal: bool = True, parts: str = "TG"
    ) -> tuple[Any, ...]:
        """Two heads, of which the first has values of this size."""
        q, k = (torch.randn(3, length, 2, 34, generator=generator) for _ in range(2))
        v, lam, gate = (torch.randn(3, length, 2, 17, generator=generator) for _ in range(3))
        v[:, :, 0] *= size
        beta = None if inverse is None else torch.tensor([[inverse], [1.0]]).repeat(1, 17)
        gates = lam if "T" in parts else None, gate if "G" in parts else None
        return q, k, v, beta, *gates, None, None, None, causal, None, 1e-6

    segments = torch.arange(71)[None].expand(3, -1) // 40
    window = (*example()[:7], segments, segments, True, 5, 1e-6)
    return {
        "causal": example(),
        "encoder": example(causal=False),
        "narrow": example(0.01),
        "narrow encoder": example(0.01, causal=False),
        "all alike": example(0.0, 5.0),
        "far apart": example(300.0, 3.0),
        "cold": example(200.0, 0.03),
        "cold encoder": example(200.0, 0.03, causal=False),
        "few tokens": example(length=5),
        "mean": example(inverse=None, parts="G"),
        "free energy": example(parts=""),
        "window and segments": window,
    }
