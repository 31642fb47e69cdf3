"""The softmax prior's read of one token after a cache: two matrix-vector products instead of an attention call."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from femixer.kernels.attend import Geometry, pieces
from femixer.kernels.backend import native, one_token
from femixer.kernels.precision import without_autocast
from femixer.kernels.softmax import softmax_read
from femixer.kernels.streams import FAR_BELOW, LOG2_E, SMALL_BETA, far_below, least_log
from femixer.state import Growing


def softmax_step(
    q: Tensor, cached_keys: Growing, cached: Growing, shift: Tensor | None, beta: Tensor | None, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    """softmax_read of one query q [B, 1, H, E] after cached keys [B, G, S, E]; no gradients.

    cached: the values [B, G, S, D], or [B, G, S, 2D] where the cache keeps exp(beta (v - shift)) beside them;
    shift [B, G, 1, D]: otherwise, at least the largest value.
    """
    if one_token(q) and geometry.needs_no_mask(cached_keys.length):
        read = _compiled_step(q, cached_keys, cached, shift, beta)
        if read is not None:
            return read
    keys, data = cached_keys.tensor, cached.tensor
    batch, _, heads, width = q.shape
    groups = keys.shape[1]
    if batch == 0:
        nothing = q.new_empty(0, 1, heads, data.shape[-1] if beta is None else beta.shape[-1])
        return nothing, None if beta is None else nothing
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


def _compiled_step(
    q: Tensor, keys: Growing, data: Growing, shift: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """The same, where all of the cache is seen; None if a sum is not good enough."""
    batch, _, heads, width = q.shape
    groups = keys.buffer.shape[1]
    d = data.buffer.shape[3] if beta is None else beta.shape[1]
    mean = q.new_empty(batch, 1, heads, d)
    free = q.new_empty(batch, 1, heads, d) if beta is not None else None
    grouped = batch, groups, heads // groups, d
    doubtful = np.zeros((batch, groups), dtype=np.bool_)
    native("softmax_step").read(
        q.view(*grouped[:3], width).numpy(),
        width**-0.5,
        keys.buffer.numpy(),
        data.buffer.numpy(),
        _NOTHING if shift is None else shift.contiguous().numpy(),
        _NO_BETA if beta is None else beta.contiguous().numpy(),
        keys.length,
        (math.exp(least_log(q.dtype)), SMALL_BETA, FAR_BELOW),
        mean.view(grouped).numpy(),
        _NOTHING if free is None else free.view(grouped).numpy(),
        doubtful,
    )
    return None if doubtful.any() else (mean, free)


_NOTHING, _NO_BETA = torch.empty(0, 0, 0, 0).numpy(), torch.empty(0, 0).numpy()


def _read_again(
    q: Tensor, keys: Tensor, values: Tensor, beta: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    runs = None
    if geometry.run_q is not None and geometry.run_k is not None:
        runs = (geometry.run_q, geometry.run_k)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    return softmax_read(q, k, v, beta, causal=True, window=geometry.window, bias=geometry.bias, runs=runs)
