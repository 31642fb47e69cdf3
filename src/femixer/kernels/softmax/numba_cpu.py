"""The softmax read on a CPU: short sequences whole in one compiled kernel, longer ones by torch's attention with
compiled kernels around it.

torch's attention and the dozen operations around it are made for long sequences and wide heads; for some tens of tokens
and heads of a few channels most of their time is overhead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import filled
from femixer.kernels.softmax import exact, numba_short, plain
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.streams import numba_cpu as streams

FLOATS, ANY = (torch.float32,), ("bias",)
# Longer sequences, or wider heads, are faster by matrix products: so many keys, channels, and keys times channels at
# most. Without the short way a layer of 8 to 42 tokens in heads of 4 to 16 channels, as forecasters have, takes 16 to
# 43 % longer and its training step 7 to 28 %. At 48 tokens of 8 channels both are even; at 64 tokens the short way is 3
# to 7 % slower for 8 channels and 20 to 30 % for 16.
LENGTH, WIDTH, SIZE = 64, 32, 384


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, beta, *visible, scale = arguments
    seen = Visibility(*visible)
    if not is_short(q, k, v, seen):
        return plain.forward(*arguments, steps=streams)
    mean, log_z = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    free = q.new_empty((0,) * 4) if beta is None else mean.new_empty(*mean.shape)
    again = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool)
    numba_short.forward(*_inputs(q, k, v, beta, seen), seen.causal, scale, mean, free, log_z, again)
    if bool(again.any()):
        exact.read_again(free, again, (q, k, v, beta), seen, scale)
        free = torch.maximum(free, mean)
    # There is no shift; nothing reads it.
    top, base = (q.new_empty(0 if beta is None else (q.shape[0], 1, *v.shape[2:])) for _ in range(2))
    return mean, q.new_empty(0) if beta is None else free, log_z.transpose(1, 2), again, top, base


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, beta, *visible, scale = arguments
    seen = Visibility(*visible)
    if not is_short(q, k, v, seen):
        return plain.backward(grads, arguments, results, needed, steps=streams)
    mean, log_z, again = results[0], results[2].transpose(1, 2), results[3]
    heads, groups = q.shape[2], k.shape[2]
    to_mean, to_free = filled(grads[:2], results)
    by_mean, by_free = to_mean, q.new_empty((0,) * 4) if beta is None else to_free
    if some := bool(again.any()):
        by_mean, by_free = (x.masked_fill(again[:, None, :, None], 0) for x in (to_mean, to_free))
    d_q, d_k, d_v = (q.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (q, k, v))
    d_beta = q.new_empty((0,) * 3 if beta is None else (q.shape[0], heads, v.shape[3]), dtype=torch.float64)
    inputs = (by_mean, by_free, *_inputs(q, k, v, beta, seen))
    numba_short.backward(*inputs, seen.causal, scale, mean, log_z, d_q, d_k, d_v, d_beta)
    if heads != groups:
        d_k, d_v = (x.unflatten(2, (groups, -1)).sum(3) for x in (d_k, d_v))
    to_beta = None
    if beta is not None:
        to_beta = d_beta.sum(0).unflatten(0, (groups, -1)).sum(1).to(beta.dtype)
    found = exact.Gradients(d_q, d_k, d_v, to_beta, None)
    if some:
        exact.add_gradients(found, again, (q, k, v, beta), seen, scale, (to_mean, to_free, None))
    return *found, None, None


def is_short(q: Tensor, k: Tensor, v: Tensor, seen: Visibility) -> bool:
    """Whether one kernel does it all; it knows segments and causality, but no bias and no window."""
    keys, width = k.shape[1], max(q.shape[3], v.shape[3])
    if not 0 < keys <= LENGTH or width > WIDTH or keys * width > SIZE:
        return False
    if seen.causal and q.shape[1] > keys:
        return False
    return seen.bias is None and (seen.window is None or seen.window >= keys)


def _inputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, seen: Visibility) -> tuple[Tensor, ...]:
    nothing, none = q.new_empty(0, 0), q.new_empty(0, 0, dtype=torch.long)
    segments = (none if x is None else x.long() for x in (seen.segments_q, seen.segments_k))
    return q, k, v, nothing if beta is None else beta, *segments
