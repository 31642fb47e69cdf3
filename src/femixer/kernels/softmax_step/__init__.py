"""The softmax read of one token of a stream: the token joins a cache and reads it.

    p(i) = softmax_i(<q, k_i> / sqrt(E) + bias_i),   mu = sum_i p(i) v_i,   F = log(sum_i p(i) exp(beta v_i)) / beta

Axes: B batch, H heads, G key/value heads, E key width, D value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels import softmax
from femixer.kernels.check import Tolerance
from femixer.kernels.operator import Operator
from femixer.kernels.softmax.visibility import Visibility, pieces
from femixer.kernels.streams import SMALL_BETA, far_below, least_sum, readable

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


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """In torch's operations, as two matrix-vector products. The cache is written in place, as its caller asks.

    On a CPU a token whose sums are doubtful is read again, exactly; elsewhere F is mu where they have underflowed (see
    `femixer.kernels.softmax.plain`).
    """
    q, k, v, keys, data, shift, beta, bias, segments_q, segments_k, length, window = arguments
    shift, doubt = shift.detach(), torch.zeros(keys.shape[:2], dtype=torch.int8, device=q.device)
    cached, top = data[:, :, :length], shift
    if k is not None and v is not None:
        keys[:, :, length - 1] = k[:, 0]
        v = v.transpose(1, 2)
        shift, doubt = _write(v, cached[:, :, -1:], shift, beta)
        top = shift
        # An exponential that is too large may be infinite; the values are not. Where nobody may ask, they serve always.
        if cached.shape[3] > v.shape[3] and (not readable(q) or bool(doubt.any())):
            cached, top = cached[..., : v.shape[3]], torch.maximum(shift, v)
    seen = Visibility(bias, segments_q, segments_k, True, window)
    mean, free = _read(q, keys[:, :, :length], cached, top, beta, seen)
    return mean, free, shift, doubt


def _write(v: Tensor, place: Tensor, shift: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value [B, G, 1, D] goes to its place in the cache -> (the cache's next shift, doubt)."""
    width = v.shape[3]
    place[..., :width] = v
    if beta is None or place.shape[3] == width:
        return torch.maximum(shift, v), torch.zeros(v.shape[:2], dtype=torch.int8, device=v.device)
    above = beta[:, None] * (v - shift)
    place[..., width:] = above.exp()
    return shift, (above > HEADROOM).any(-1).any(-1).to(torch.int8) * TOO_LARGE


def _read(
    q: Tensor, keys: Tensor, data: Tensor, shift: Tensor, beta: Tensor | None, seen: Visibility
) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = q.shape
    groups, d = keys.shape[1], data.shape[3] if beta is None else beta.shape[1]
    _, at, mask, _ = next(pieces(q, keys.transpose(1, 2), seen))
    visible = data[:, :, at]
    scores = q.reshape(batch, groups, heads // groups, width) * width**-0.5 @ keys[:, :, at].mT
    if mask is not None:
        scores = scores + mask.expand(batch, heads, 1, -1).reshape(scores.shape)
    p = torch.softmax(scores, -1)
    sums = p @ visible
    mean, free = sums[..., :d], None
    if beta is not None:
        total = sums[..., d:] if data.shape[3] > d else p @ (beta[:, None] * (visible - shift)).exp()
        lost = total < least_sum(q.dtype)
        free = torch.addcdiv(shift, torch.where(lost, 1, total).log(), beta[:, None])
        # One look at all conditions under which the sum is not good enough.
        if readable(q) and bool((lost | far_below(free, shift) | (beta[:, None] < SMALL_BETA)).any()):
            k, v = keys.transpose(1, 2), data[..., :d].transpose(1, 2)
            return softmax.OPERATOR(q, k, v, beta, *seen, width**-0.5)[:2]  # type: ignore[return-value]
        free = torch.maximum(torch.where(lost, mean, free), mean)
    results = [x.reshape(batch, 1, heads, d) for x in (mean, free) if x is not None]
    if (padding := seen.padding()) is not None:
        results = [x.masked_fill(padding, 0) for x in results]
    return results[0], q.new_empty(0) if free is None else results[1]


# Cached exponentials of the examples have been float32.
TOLERANCES = {torch.float64: Tolerance(1e-6, 1e-6)}


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """The definition of the read, in float64; without gradients, as a step has none."""
    q, k, v, keys, data, shift, beta, bias, segments_q, segments_k, length, window = arguments
    with torch.no_grad():
        width = shift.shape[3]
        keys, values = (x[:, :, :length].transpose(1, 2).double() for x in (keys, data[..., :width]))
        top = shift.detach().double()
        if k is not None and v is not None:
            keys, values = torch.cat([keys[:, :-1], k], 1), torch.cat([values[:, :-1], v], 1)
            if data.shape[3] == width:
                top = torch.maximum(top, v.double().transpose(1, 2))
        given = q, keys, values, beta, bias, segments_q, segments_k, True, window, q.shape[3] ** -0.5
        return *softmax.definition(*given), top


def examples() -> dict[str, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def example(
        length: int = 67,
        size: float = 1.0,
        above: float = 0.0,
        *,
        heads: int = 2,
        beta: bool = True,
        exponentials: bool = False,
        written: bool = False,
        bias: bool = False,
        segments: bool = False,
        window: int | None = None,
    ) -> tuple[Any, ...]:
        q, k, v = noise(3, 1, heads, 6), noise(3, 1, 2, 6), size * noise(3, 1, 2, 5)
        v[..., 0] += above
        keys, values = noise(3, 2, length + 3, 6), size * noise(3, 2, length + 3, 5)
        inverse = 0.5 + torch.rand(2, 5, generator=generator)
        shift = values[:, :, :length].amax(2, keepdim=True)
        data = torch.cat([values, (inverse[:, None] * (values - shift)).exp()], -1) if exponentials else values
        of_keys = None
        if segments:
            of_keys = (torch.arange(length) // 11).expand(3, -1).clone()
            of_keys[0, -3:-1] = of_keys[2, -1] = -1
        return (
            q,
            None if written else k,
            None if written else v,
            keys,
            data,
            shift,
            inverse if beta else None,
            noise(3, heads, 1, length) if bias else None,
            None if of_keys is None else of_keys[:, -1:],
            of_keys,
            length,
            window,
        )

    return {
        "whole cache": example(),
        "grouped": example(heads=6),
        "with exponentials": example(exponentials=True, heads=4),
        "mean": example(beta=False),
        "first token": example(length=1),
        "already written": example(written=True),
        "window": example(window=5),
        "bias and segments": example(bias=True, segments=True),
        "far apart": example(size=300.0),
        "beyond its exponentials": example(above=1e3, exponentials=True, heads=4),
        "padding beyond its exponentials": example(above=1e3, exponentials=True, segments=True),
    }
