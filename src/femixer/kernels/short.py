"""The softmax read of short sequences, whole in one compiled kernel.

torch's attention and the dozen operations around it are made for long sequences and wide heads; for some tens of tokens
and heads of a few channels most of their time is overhead. Here sums are float64 and relative to what a row sees, so
nothing has to be read again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from femixer.kernels.attend import Geometry
from femixer.kernels.backend import array, compiled, native

# Longer sequences, or wider heads, are faster by matrix products.
LENGTH, WIDTH = 64, 32


def is_short(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> bool:
    """Whether the kernel serves this read: q [B, T, H, E], k [B, S, G, E], v [B, S, G, D]."""
    keys = k.shape[1]
    if not 0 < keys <= LENGTH or max(q.shape[3], v.shape[3]) > WIDTH or q.dtype != torch.float32:
        return False
    if geometry.causal and q.shape[1] > keys:
        return False
    if geometry.bias is not None or (geometry.window is not None and geometry.window < keys):
        return False
    return compiled(q)


def read(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, geometry: Geometry, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [B, T, H, D], free energy likewise or empty, log-normalizers [B, H, T])."""
    mean, log_z = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    free = q.new_empty((0,) * 4) if beta is None else torch.empty_like(mean)
    results = map(array, (mean, free, log_z))
    native("short").forward(*_inputs(q, k, v, beta, geometry), geometry.causal, scale, *results)
    return mean, q.new_empty(0) if beta is None else free, log_z.transpose(1, 2)


def gradients(
    grad_mean: Tensor,
    grad_free: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    geometry: Geometry,
    scale: float,
    mean: Tensor,
    log_z: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of q, k, v and beta (empty where there is none)."""
    heads, groups = q.shape[2], k.shape[2]
    results = [q.new_empty(*x.shape[:2], heads, x.shape[3]) for x in (q, k, v)]
    d_beta = q.new_empty((0,) * 3 if beta is None else (q.shape[0], heads, v.shape[3]), dtype=torch.float64)
    to_free = grad_mean.new_empty((0,) * 4) if grad_free is None else grad_free.contiguous()
    native("short").backward(
        *map(array, (grad_mean.contiguous(), to_free)),
        *_inputs(q, k, v, beta, geometry),
        geometry.causal,
        scale,
        *map(array, (mean, log_z.transpose(1, 2).contiguous(), *results, d_beta)),
    )
    d_q, d_k, d_v = results
    if heads != groups:
        d_k, d_v = (x.unflatten(2, (groups, -1)).sum(3) for x in (d_k, d_v))
    if beta is None:
        return d_q, d_k, d_v, q.new_empty(0)
    return d_q, d_k, d_v, d_beta.sum(0).unflatten(0, (groups, -1)).sum(1).to(beta.dtype)


def _inputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, geometry: Geometry) -> list[np.ndarray]:
    nothing, none = q.new_empty(0, 0), q.new_empty(0, 0, dtype=torch.long)
    whole = (q, k, v, nothing if beta is None else beta)
    runs = (none if run is None else run.long() for run in (geometry.run_q, geometry.run_k))
    return [array(x.contiguous()) for x in (*whole, *runs)]
