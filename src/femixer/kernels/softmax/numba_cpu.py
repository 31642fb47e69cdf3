"""The softmax read on a CPU: short sequences whole in one compiled kernel, longer ones by torch's attention with
compiled kernels around it.

torch's attention and the dozen operations around it are made for long sequences and wide heads; for some tens of tokens
and heads of a few channels most of their time is overhead. The kernel for short sequences has sums in float64 relative
to what a row sees, so nothing has to be read again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import filled
from femixer.kernels.softmax import numba_short, one_pass
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.streams import numba_cpu as streams

FLOATS, ANY = (torch.float32,), ("bias",)
# Longer sequences, or wider heads, are faster by matrix products: so many keys, channels, and keys times channels at
# most. Without the short way a layer of 8 to 42 tokens in heads of 4 to 16 channels, as forecasters have, takes 16 to
# 43 % longer and its training step 7 to 28 %. At 48 tokens of 8 channels both are even; at 64 tokens the short way is 3
# to 7 % slower for 8 channels and 20 to 30 % for 16.
LENGTH, WIDTH, SIZE = 64, 32, 384


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, beta, bias, segments_q, segments_k, causal, window, scale = arguments
    seen = Visibility(bias, segments_q, segments_k, causal, window)
    if not is_short(q, k, v, seen):
        return one_pass.forward(q, k, v, beta, seen, scale, streams)
    mean, log_z = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    free = q.new_empty((0,) * 4) if beta is None else mean.new_empty(*mean.shape)
    numba_short.forward(*_inputs(q, k, v, beta, seen), causal, scale, mean, free, log_z)
    again = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool)
    # There is no shift; nothing reads it.
    top, base = (q.new_empty(0 if beta is None else (q.shape[0], 1, *v.shape[2:])) for _ in range(2))
    return mean, q.new_empty(0) if beta is None else free, log_z.transpose(1, 2), again, top, base


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, beta, bias, segments_q, segments_k, causal, window, scale = arguments
    seen = Visibility(bias, segments_q, segments_k, causal, window)
    if not is_short(q, k, v, seen):
        return one_pass.backward(grads, arguments, results, needed, streams)
    mean, log_z = results[0], results[2].transpose(1, 2)
    heads, groups = q.shape[2], k.shape[2]
    to_mean, to_free = filled(grads[:2], results)
    if beta is None:
        to_free = q.new_empty((0,) * 4)
    d_q, d_k, d_v = (q.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (q, k, v))
    d_beta = q.new_empty((0,) * 3 if beta is None else (q.shape[0], heads, v.shape[3]), dtype=torch.float64)
    inputs = (to_mean, to_free, *_inputs(q, k, v, beta, seen))
    numba_short.backward(*inputs, causal, scale, mean, log_z, d_q, d_k, d_v, d_beta)
    if heads != groups:
        d_k, d_v = (x.unflatten(2, (groups, -1)).sum(3) for x in (d_k, d_v))
    to_beta = None
    if beta is not None:
        to_beta = d_beta.sum(0).unflatten(0, (groups, -1)).sum(1).to(beta.dtype)
    return d_q, d_k, d_v, to_beta, None, None, None


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
