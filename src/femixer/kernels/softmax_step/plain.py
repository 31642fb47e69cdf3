"""One token's softmax read as two matrix-vector products. The cache is written in place, as its caller asks.

On a CPU a token whose sums are doubtful is read again, exactly; elsewhere F is mu where they have underflowed (see
`femixer.kernels.softmax.plain`)."""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.softmax import softmax_read
from femixer.kernels.softmax.visibility import Visibility, pieces
from femixer.kernels.softmax_step import HEADROOM, TOO_LARGE
from femixer.kernels.streams import SMALL_BETA, far_below, least_sum, readable


def forward(
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
            return _read_again(q, keys, data[..., :d], beta, seen)
        free = torch.maximum(torch.where(lost, mean, free), mean)
    results = [x.reshape(batch, 1, heads, d) for x in (mean, free) if x is not None]
    padding = seen.padding()
    if padding is not None:
        results = [x.masked_fill(padding, 0) for x in results]
    return results[0], q.new_empty(0) if free is None else results[1]


def _read_again(q: Tensor, keys: Tensor, values: Tensor, beta: Tensor, seen: Visibility) -> tuple[Tensor, Tensor]:
    segments = None
    if seen.segments_q is not None and seen.segments_k is not None:
        segments = seen.segments_q, seen.segments_k
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    mean, free = softmax_read(q, k, v, beta, window=seen.window, bias=seen.bias, segments=segments)
    assert free is not None
    return mean, free
