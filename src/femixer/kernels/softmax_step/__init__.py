"""The softmax read of one token of a stream: the token joins a cache and reads it.

    p(i) = softmax_i(<q, k_i> / sqrt(E) + bias_i),   mu = sum_i p(i) v_i,   F = log(sum_i p(i) exp(beta v_i)) / beta

Axes: B batch, H heads, G key/value heads, E key width, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.operator import Operator

# A cached exponential may exceed its shift by this many nats before it must be made anew.
HEADROOM = 40.0
# A `doubt` that says so.
TOO_LARGE = 2


def _results(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    data: Tensor,
    shift: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    length: int,
    window: int | None,
) -> tuple[Tensor, ...]:
    width = data.shape[3] if beta is None else beta.shape[1]
    mean = q.new_empty(*q.shape[:3], width)
    free = q.new_empty(0 if beta is None else mean.shape)
    doubt = q.new_empty(*keys.shape[:2], dtype=torch.int8)
    return mean, free, torch.empty_like(shift, memory_format=torch.contiguous_format), doubt


# A compiler sees the plain form: it knows how to write to a cache, which an opaque operator may not.
OPERATOR = Operator(__name__, _results, outputs=4, internal=1, fusible=True, gradients=False)


def softmax_step(
    q: Tensor,
    token: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor, Tensor],
    beta: Tensor | None,
    length: int,
    *,
    window: int | None = None,
    bias: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(mean, free energy [B, 1, H, D] or None without beta, the cache's next shift, doubt); no gradients.

    q [B, 1, H, E]. token: its key [B, 1, G, E] and value [B, 1, G, D], which are written to the cache as its last of
    `length`; None if they are there. cache: keys [B, G, room, E]; values [B, G, room, D], or [B, G, room, 2 D] where it
    keeps exp(beta (v - shift)) beside them; shift [B, G, 1, D], at least the largest value otherwise. bias:
    broadcastable to [B, H, 1, length]; segments: (of the query [B, 1], of the keys [B, length]).
    doubt [B, G]: TOO_LARGE where an exponential exceeds HEADROOM, so that the cache must be made anew.
    """
    k, v = (None, None) if token is None else token
    keys, data, shift = cache
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], 1, length)
    of_query, of_keys = (None, None) if segments is None else segments
    mean, free, top, doubt = OPERATOR(q, k, v, keys, data, shift, beta, bias, of_query, of_keys, length, window)
    return mean, None if beta is None else free, top, doubt
