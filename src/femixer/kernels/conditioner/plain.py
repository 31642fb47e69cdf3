"""The conditioner's features in torch's operations, whose number grows with the logarithm of the length."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import is_end, is_padding, is_start
from femixer.kernels.operator import wide_dtype
from femixer.kernels.reading import wide
from femixer.kernels.recurrence.plain import scan

READS_RESULTS = slice(-1, None)


def forward(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    dtype, y = y.dtype, y.to(wide_dtype(y))
    gates, later_gates, u = _gates(y, marks)
    sums = scan(gates, u, initial, resets=marks is not None)
    if not u.shape[1]:
        last = y.new_zeros(u.shape[0], u.shape[2]) if initial is None else initial.to(y.dtype, copy=True)
    else:
        last = sums[:, -1].to(y.dtype, copy=True)  # not a view, which would keep the whole sequence in memory
    h = sums
    if not causal:
        # later_t = decay_t (u_{t+1} + later_{t+1}): without the token itself, which counts once.
        from_here = scan(later_gates.roll(1, 1), u, resets=marks is not None, backwards=True)
        later = later_gates.exp() * F.pad(from_here[:, 1:], (0, 0, 0, 1))
        h, sums = sums + later, torch.cat([sums, later], -1)
    direction = F.normalize(F.softplus(y.chunk(3, -1)[2]), dim=-1)
    features = F.silu(direction) * F.layer_norm(h.to(y.dtype), h.shape[-1:], eps=eps)
    return features.to(dtype), last, sums


def _gates(y: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the decays forwards and backwards in time, and the inputs u, in `wide`."""
    s, u = wide(y[..., : y.shape[-1] // 3 * 2]).chunk(2, -1)
    gates = F.logsigmoid(-s)  # -softplus(s)
    if marks is None:
        return gates, gates, u
    padding, start, end = (found(marks)[..., None] for found in (is_padding, is_start, is_end))
    gates, u = gates.masked_fill(padding, 0), u.masked_fill(padding, 0)
    return gates.masked_fill(start, -torch.inf), gates.masked_fill(end, -torch.inf), u


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    to_features, to_last, _ = grads
    y, marks, initial, causal, eps = arguments
    if not y.shape[1]:
        return torch.zeros_like(y), None, to_last
    dtype, y = y.dtype, y.to(wide_dtype(y))
    h, *later = results[0].chunk(1 if causal else 2, -1)
    if to_features is None:
        to_h, to_a = torch.zeros_like(h), y.new_zeros(h.shape)
    else:
        to_h, to_a = _through_features(to_features.to(y.dtype), y.chunk(3, -1)[2], h + later[0] if later else h, eps)
    gates, later_gates, u = _gates(y, marks)
    # e_t = d h_t + decay_{t+1} e_{t+1}
    to_sums = to_h if to_last is None else torch.cat([to_h[:, :-1], to_h[:, -1:] + to_last[:, None]], 1)
    error = scan(gates, to_sums, resets=marks is not None, backwards=True)
    to_initial = None if initial is None else (error[:, 0] * gates[:, 0].exp()).to(y.dtype)
    # The log decay is -softplus(s), and what it multiplies is decay_t h_{t-1} = h_t - u_t.
    to_s, to_u = torch.ops.aten.softplus_backward(error * (u - h), wide(y[..., : u.shape[2]]), 1, 20), error
    if later:
        ahead = later_gates.exp()
        error = scan(later_gates.roll(1, 1), to_h, resets=marks is not None)
        to_s = to_s + error * later[0] * (ahead - 1)
        to_u = to_u + F.pad((ahead * error)[:, :-1], (0, 0, 1, 0))
    if marks is not None:
        to_s, to_u = (x.masked_fill(is_padding(marks)[..., None], 0) for x in (to_s, to_u))
    return torch.cat([to_s.to(dtype), to_u.to(dtype), to_a.to(dtype)], -1), None, to_initial


def _through_features(grad: Tensor, logits: Tensor, h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of h, in `wide`, and of the logits of a. Both norms take out what points along their results."""
    positive = F.softplus(logits)
    length = torch.linalg.vector_norm(positive, dim=-1, keepdim=True).clamp_min(1e-12)  # F.normalize's
    z = positive / length
    shape, sums = list(h.shape[-1:]), h.to(grad.dtype)
    normal, mean, scale = torch.native_layer_norm(sums, shape, None, None, eps)
    to_h, _, _ = torch.ops.aten.native_layer_norm_backward(
        grad * F.silu(z), sums, shape, mean, scale, None, None, [True, False, False]
    )
    to_z = torch.ops.aten.silu_backward(grad * normal, z)
    to_positive = torch.addcmul(to_z, z, (to_z * z).sum(-1, keepdim=True), value=-1) / length
    return wide(to_h), torch.ops.aten.softplus_backward(to_positive, logits, 1, 20)
