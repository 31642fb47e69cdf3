"""The softmax prior's read of one token after a cache: two matrix-vector products instead of an attention call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from femixer.kernels.attend import Geometry, pieces
from femixer.kernels.precision import without_autocast
from femixer.kernels.softmax import softmax_read
from femixer.kernels.streams import LOG2_E, SMALL_BETA, far_below, least_log


def softmax_step(
    q: Tensor, keys: Tensor, data: Tensor, shift: Tensor | None, beta: Tensor | None, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    """softmax_read of one query q [B, 1, H, E] after cached keys [B, G, S, E]; no gradients.

    data: the cached values [B, G, S, D], or [B, G, S, 2D] where the cache keeps exp(beta (v - shift)) beside them;
    shift [B, G, 1, D]: otherwise, at least the largest value.
    """
    batch, _, heads, width = q.shape
    groups = keys.shape[1]
    d = data.shape[-1] if beta is None else beta.shape[-1]
    seen, mask = next((piece.keys, piece.mask) for piece in pieces(q, keys.transpose(1, 2), geometry))
    visible = data[:, :, seen]
    free = None
    with without_autocast(q.device):
        scores = q.view(batch, groups, heads // groups, width) * width**-0.5 @ keys[:, :, seen].mT
        if mask is not None:
            scores = scores + mask.expand(batch, heads, 1, -1).reshape(scores.shape)
        p = torch.softmax(scores, -1)
        mean = p @ visible
        if beta is not None:
            assert shift is not None
            if data.shape[-1] > d:
                mean, total = mean.split(d, -1)
            else:
                slope = beta[:, None] * LOG2_E
                total = p @ torch.addcmul(-shift * slope, visible, slope).exp2_()
            least = total.amin()
            free = torch.addcdiv(shift, total.log_(), beta[:, None])
            # One look at all conditions under which the sum is not good enough.
            doubtful = (least < math.exp(least_log(q.dtype))) | (beta.amin() < SMALL_BETA)
            if bool(doubtful | far_below(free, shift).any()):
                return _read_again(q, keys, data[..., :d], beta, geometry)
            free = torch.maximum(free, mean)
    results = [x.reshape(batch, 1, heads, d) for x in (mean, free) if x is not None]
    if geometry.run_q is not None:
        results = [x.masked_fill((geometry.run_q < 0)[..., None, None], 0) for x in results]
    return results[0], None if free is None else results[1]


def _read_again(
    q: Tensor, keys: Tensor, values: Tensor, beta: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    runs = None
    if geometry.run_q is not None and geometry.run_k is not None:
        runs = (geometry.run_q, geometry.run_k)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    return softmax_read(q, k, v, beta, causal=True, window=geometry.window, bias=geometry.bias, runs=runs)
