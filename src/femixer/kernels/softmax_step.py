"""The softmax prior's read of one token after a cache: two matrix-vector products instead of an attention call, in
torch, or with all that belongs to the token in one compiled kernel."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from femixer.kernels.attend import Geometry, pieces
from femixer.kernels.backend import native
from femixer.kernels.precision import without_autocast
from femixer.kernels.softmax import softmax_read
from femixer.kernels.streams import FAR_BELOW, LOG2_E, SMALL_BETA, far_below, least_log
from femixer.state import Growing

# A cached exponential may exceed its shift by this many nats before the shift is renewed.
CACHE_HEADROOM = 40.0
# Of the compiled kernel: of sums, temperatures, differences to the shift and cached exponentials.
LIMITS = math.exp(least_log(torch.float32)), SMALL_BETA, FAR_BELOW, CACHE_HEADROOM


def softmax_step(
    q: Tensor, cached_keys: Growing, cached: Growing, shift: Tensor | None, beta: Tensor | None, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    """softmax_read of one query q [B, 1, H, E] after cached keys [B, G, S, E]; no gradients.

    cached: the values [B, G, S, D], or [B, G, S, 2D] where the cache keeps exp(beta (v - shift)) beside them;
    shift [B, G, 1, D]: otherwise, at least the largest value.
    """
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


def _read_again(
    q: Tensor, keys: Tensor, values: Tensor, beta: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor | None]:
    runs = None
    if geometry.run_q is not None and geometry.run_k is not None:
        runs = (geometry.run_q, geometry.run_k)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    return softmax_read(q, k, v, beta, causal=True, window=geometry.window, bias=geometry.bias, runs=runs)


class Step(NamedTuple):
    """What a token reads [B, 1, H, D] and the cache's next shift [B, G, 1, D]; sound: the read is exact; fits: so are
    the cached exponentials."""

    mean: Tensor
    free: Tensor | None
    shift: Tensor
    sound: bool
    fits: bool


def compiled_step(
    q: Tensor, k: Tensor, v: Tensor, keys: Growing, data: Growing, shift: Tensor, beta: Tensor | None
) -> Step:
    """The token q [B, 1, H, E], k [B, 1, G, E], v [B, 1, G, D] is written to the end of a cache (see `softmax_step`)
    and reads all of it: one kernel, for where `one_token` allows it."""
    batch, _, heads, width = q.shape
    groups, d = v.shape[2:]
    mean = q.new_empty(batch, 1, heads, d)
    free = q.new_empty(batch, 1, heads, d) if beta is not None else None
    top = q.new_empty(shift.shape)
    doubt = np.empty((batch, groups), dtype=np.int8)
    grouped = batch, groups, heads // groups, d
    native("softmax_step").step(
        q.contiguous().view(*grouped[:3], width).numpy(),
        k.contiguous().view(batch, groups, width).numpy(),
        v.contiguous().view(batch, groups, d).numpy(),
        keys.buffer.view(batch * groups, -1).numpy(),
        data.buffer.view(batch * groups, -1).numpy(),
        data.buffer.shape[3],
        shift.contiguous().view(batch, groups, d).numpy(),
        np.empty((groups, 0), dtype=np.float32) if beta is None else beta.contiguous().numpy(),
        keys.length,
        LIMITS,
        top.view(batch, groups, d).numpy(),
        mean.view(grouped).numpy(),
        (mean if free is None else free).view(grouped).numpy(),
        doubt,
    )
    worst = doubt.max()
    return Step(mean, free, top, worst == 0, worst < 2)
