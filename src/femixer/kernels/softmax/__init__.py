"""The read under the softmax prior.

    p_t(i) = softmax_i(scale <q_t, k_i> + bias_ti)  over the keys i that t sees
    mu_t = sum_i p_t(i) v_i,    F_t = log(sum_i p_t(i) exp(beta v_i)) / beta   per channel

Axes: B batch, T queries, S keys, H heads, G key/value heads (H = G * repeats), E key width, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import Operator


def _results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """mean and free energy [B, T, H, D]; internal: log-normalizers [B, H, T], heads that were read again [B, H], top
    and base of the exponentials [B, 1, G, D]. Without beta there is no free energy, top and base: empty."""
    batch, length, heads = q.shape[:3]
    mean = q.new_empty(batch, length, heads, v.shape[3])
    free, top, base = (
        q.new_empty(0 if beta is None else shape)
        for shape in (mean.shape, (batch, 1, *v.shape[2:]), (batch, 1, *v.shape[2:]))
    )
    again = q.new_empty(batch, heads, dtype=torch.bool)
    return mean, free, q.new_empty(batch, heads, length), again, top, base


OPERATOR = Operator(__name__, _results, outputs=6, internal=4)


def softmax_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    bias: Tensor | None = None,
    decays: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mean and free energy [B, T, H, D] of v under softmax(q k * scale + bias); the free energy only if beta is given.

    q [B, T, H, E]; k [B, S, G, E]; v [B, S, G, D]; beta [G, D] > 0. Causal queries are the last T of the S tokens.
    window: a query sees keys less than `window` real tokens away. bias: broadcastable to [B, H, T, S];
    or decays [B, H, 2 S], sums of log decays before each token and up to it, best in float64: the bias is the sum of
    those after the key up to the query, or from the query to before the key.
    segments: (of queries [B, T], of keys [B, S]) integers; a query sees the keys of its own segment; negative is
    padding, whose reads are zero. scale: E^-1/2 if None.
    """
    if q.shape[0] == 0 or q.shape[1] == 0:
        nothing = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return nothing, None if beta is None else nothing
    assert bias is None or decays is None
    if bias is not None:
        decays = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    of_queries, of_keys = (None, None) if segments is None else segments
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mean, free, *_ = OPERATOR(q, k, v, beta, decays, of_queries, of_keys, causal, window, scale)
    return mean, None if beta is None else free


def reading_dtype(v: Tensor, beta: Tensor | None) -> torch.dtype:
    """Exponentials and their logarithm are float32 or better; the mean alone is read in the type of the values, as
    attention reads it, but on a CPU, where half precision is not faster."""
    if beta is None and v.device.type != "cpu":
        return v.dtype
    return torch.promote_types(v.dtype, torch.float32)
