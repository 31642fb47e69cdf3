"""The softmax read with its gates: what a layer does between its projections, at once where a backend can.

    o = g * ((1 - lam) mu + lam F),   lam = sigmoid(a),   g = softplus(b) / rms

mu and F of `femixer.kernels.softmax`, the gates of `femixer.kernels.gates`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels import gates as gating
from femixer.kernels import softmax
from femixer.kernels.operator import Operator


def _results(
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
    """The gated read; internal, what a backend keeps for its backward."""
    return q.new_empty(*q.shape[:3], v.shape[3]), *(q.new_empty(0) for _ in range(6))


# Around torch's attention on a CPU, kernels for both at once won 2 % of a step at most: each runs by itself.
OPERATOR = Operator(
    __name__, _results, outputs=7, internal=6, fusible=True, composed=True, left_to_torch="the read, then its gates"
)


def gated_softmax_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    gates: tuple[Tensor | None, Tensor | None],
    eps: float,
    *,
    causal: bool = True,
    window: int | None = None,
    bias: Tensor | None = None,
    decays: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """o [B, T, H, D]; gates: the logits a and b, [B, T, H, D] each; eps is added to the mean square of softplus(b).

    Without beta the read is the mean, without a it is the free energy, without b it is not scaled. The other arguments
    are those of `softmax_read`.
    """
    if q.shape[0] == 0 or q.shape[1] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    assert bias is None or decays is None
    if bias is not None:
        decays = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    of_queries, of_keys = (None, None) if segments is None else segments
    return OPERATOR(q, k, v, beta, *gates, decays, of_queries, of_keys, causal, window, eps)[0]


DIFFERENTIABLE = True


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """As the read and the gates, one operator after the other."""
    q, k, v, beta, lam, gate, bias, segments_q, segments_k, causal, window, eps = arguments
    dtype = softmax.reading_dtype(v, beta)
    beta = None if beta is None else beta.to(dtype)
    given = bias, segments_q, segments_k, causal, window, q.shape[3] ** -0.5
    mean, free, *_ = softmax.OPERATOR(q.to(dtype), k.to(dtype), v.to(dtype), beta, *given)
    if beta is None or lam is None:
        read = mean if beta is None else free
        return (read if gate is None else gating.gated(read, None, None, gate, eps),)
    return (gating.gated(mean, free, lam, gate, eps),)


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """The definitions of the read and of the gates, in float64."""
    q, k, v, beta, lam, gate, bias, segments_q, segments_k, causal, window, eps = arguments
    given = bias, segments_q, segments_k, causal, window, q.shape[3] ** -0.5
    mean, free = softmax.definition(q, k, v, beta, *given)
    if beta is None or lam is None:
        return gating.definition(mean if beta is None else free, None, None, gate, eps)
    return gating.definition(mean, free, lam, gate, eps)


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
    until = -0.3 * torch.randn(3, 2, 71, generator=generator).abs().cumsum(2)
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
        "decays": (*example()[:6], until.repeat(1, 1, 2), None, None, True, None, 1e-6),
    }
