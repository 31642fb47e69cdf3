"""The softmax read with its gates: what a layer does between its projections, at once where a backend can.

    o = g * ((1 - lam) mu + lam F),   lam = sigmoid(a),   g = softplus(b) / rms

mu and F of `femixer.kernels.softmax`, the gates of `femixer.kernels.gates`.
"""

from __future__ import annotations

from torch import Tensor

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
    __name__,
    _results,
    outputs=7,
    internal=6,
    fusible=True,
    composed=True,
    left_to_torch="the read and its gates are operators that run one after the other",
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
    segments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """o [B, T, H, D]; gates: the logits a and b, [B, T, H, D] each; eps is added to the mean square of softplus(b).

    Without beta the read is the mean, without a it is the free energy, without b it is not scaled. The other arguments
    are those of `softmax_read`.
    """
    if q.shape[0] == 0 or q.shape[1] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    of_queries, of_keys = (None, None) if segments is None else segments
    return OPERATOR(q, k, v, beta, *gates, bias, of_queries, of_keys, causal, window, eps)[0]
