"""The softmax prior's read of one token after a cache: two matrix-vector products instead of an attention call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from femixer.kernels.attend import Geometry, pieces
from femixer.kernels.precision import without_autocast
from femixer.kernels.softmax import LOG2_E, SMALL_BETA, least_log, softmax_read


def softmax_step(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    beta: Tensor | None,
    geometry: Geometry,
    stream: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax_read of one query q [B, 1, H, E] after cached keys [B, G, S, E] and values [B, G, S, D]; no gradients.

    stream [B, G, S, 2D]: the values beside exp(beta (v - shift)), where the cache keeps them.
    """
    batch, _, heads, width = q.shape
    groups, d = keys.shape[1], values.shape[-1]
    seen, mask = next((piece.keys, piece.mask) for piece in pieces(q, keys.transpose(1, 2), geometry))
    with without_autocast(q.device):
        scores = q.view(batch, groups, heads // groups, width) * width**-0.5 @ keys[:, :, seen].mT
        if mask is not None:
            scores = scores + mask.expand(batch, heads, 1, -1).reshape(scores.shape)
        p = torch.softmax(scores, -1)
        if beta is None:
            mean, free = p @ values[:, :, seen], None
        else:
            if stream is None:
                visible = values[:, :, seen]
                shift = visible.amax(2, keepdim=True)
                mean = p @ visible
                total = p @ torch.sub(visible, shift).mul_(beta[:, None] * LOG2_E).exp2_()
            else:
                mean, total = (p @ stream[:, :, seen]).split(d, -1)
            assert shift is not None
            if bool(total.amin() < math.exp(least_log(q.dtype))) or bool(beta.amin() < SMALL_BETA):
                k, v = keys.transpose(1, 2), values.transpose(1, 2)
                runs = None if geometry.run_q is None or geometry.run_k is None else (geometry.run_q, geometry.run_k)
                window, bias = geometry.window, geometry.bias
                return softmax_read(q, k, v, beta, causal=True, window=window, bias=bias, runs=runs)
            free = torch.maximum(total.log_() / beta[:, None] + shift, mean)
    results = [x.reshape(batch, 1, heads, d) for x in (mean, free) if x is not None]
    if geometry.run_q is not None:
        results = [x.masked_fill((geometry.run_q < 0)[..., None, None], 0) for x in results]
    return results[0], results[1] if free is not None else None
