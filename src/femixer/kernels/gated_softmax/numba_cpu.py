"""The softmax read of up to some hundred tokens together with its gates, as few compiled kernels around attention.

What the read and the gates do one after the other, for the plain case: every token is real and sees all others (or all
before it), all heads have keys of their own, and queries are as wide as both streams. There the calls of a dozen small
steps, and the memory between them, take as long as the steps themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.arrays import array, strided
from femixer.kernels.gated_softmax import numba_loops as loops
from femixer.kernels.gates import numba_cpu as gates
from femixer.kernels.softmax import exact, one_pass
from femixer.kernels.softmax import numba_cpu as softmax
from femixer.kernels.softmax.attention import Attended, attend, attend_backward
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.streams import NARROW
from femixer.kernels.streams import numba_cpu as streams_kernels
from femixer.kernels.streams.numba_cpu import LIMITS


def refuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    causal: bool,
    window: int | None,
    eps: float,
) -> str | None:
    length, (batch, keys, groups, channels) = q.shape[1], v.shape
    if beta is None or lam is None or gate is None:
        return "it reads with both gates"
    if length != keys or length > one_pass.SHORT:
        return f"it reads whole sequences of at most {one_pass.SHORT} tokens"
    if bias is not None or segments_q is not None or (window is not None and window < keys):
        return "it has no bias, no segments and no window"
    if groups != q.shape[2] or q.shape[3] != 2 * channels:
        return "every head has keys of its own, twice as wide as values"
    if length <= softmax.LENGTH and q.shape[3] <= softmax.WIDTH:
        return "the read is one kernel for sequences this short"
    for x in (q, k, v, beta, lam, gate):
        if x.dtype != torch.float32:
            return f"it takes float32, not {x.dtype}"
    return None if batch else "the batch is empty"


def forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lam: Tensor, gate: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """-> (gated read; sums (mu | total - base), F, the streams, what `_attend` keeps, heads that were read again or
    none, shift), all kept: sequences are short."""
    *_, causal, _, eps = rest
    (b, t, h, d), scale = v.shape, q.shape[3] ** -0.5
    shift, streams = v.new_empty(3, b, h, d), v.new_empty(b, t, h, 2 * d)
    free, read = v.new_empty(2, b, t, h, d)
    again = torch.zeros(b, h, dtype=torch.bool)
    inverse, ranges, doubtful = array(beta.contiguous()), array(shift), array(again)
    loops.forward_streams(*strided(v), inverse, NARROW, ranges, array(streams))
    sums, norms = _attend(q, k, streams, causal, scale)
    loops.forward(*strided(sums, lam, gate), inverse, ranges, LIMITS, eps, doubtful, array(free), array(read))
    if not doubtful.any():
        return read, sums, free, streams, norms, q.new_empty(0, dtype=torch.bool), shift
    for part in exact.selections(again, q, k, v, beta, Visibility(None, None, None, causal, None), scale):
        part.put(free, exact.free_energy(part.sequences))
    mean = sums[..., :d]
    free = torch.maximum(free, mean)
    (read,) = gates.forward(mean, free, lam, gate, eps)
    return read, sums, free, streams, norms, again, shift


READS_RESULTS = slice(1, None)


def backward(
    grads: tuple[Tensor, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, beta, lam, gate, *_, causal, _, eps = arguments
    sums, free, streams, norms, again, shift = results
    if again.numel():
        return *_backward_in_steps(grads[0], arguments, results), None, None, None
    inner, d_beta = torch.empty_like(streams), v.new_empty(shift.shape[1:])
    dv, to_lam, to_gate = v.new_empty(3, *v.shape)
    inverse, ranges, to_beta = array(beta.contiguous()), array(shift), array(d_beta)
    given = *strided(sums, lam, gate), array(free), array(grads[0].contiguous())
    loops.backward(*given, inverse, ranges, eps, *map(array, (inner, to_lam, to_gate)), to_beta)
    dq, dk, to_streams = _attend_backward(inner, q, k, streams, sums, norms, causal)
    loops.backward_streams(*strided(to_streams, streams, v), inverse, ranges, array(dv), to_beta)
    return dq, dk, dv, d_beta.sum(0), to_lam, to_gate, None, None, None


def _backward_in_steps(
    grad: Tensor, arguments: tuple[Any, ...], results: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Where heads were read again: first through the gates, then through the read."""
    q, k, v, beta, lam, gate, *_, causal, _, eps = arguments
    sums, free, streams, log_z, again, shift = results
    mean, scale = sums[..., : v.shape[3]], q.shape[3] ** -0.5
    if not causal:  # there the weights were kept instead
        qh, kh, sh = (x.transpose(1, 2) for x in (q, k, streams))
        log_z = attend(qh, kh, sh, None, False, scale)[1]
    to_mean, to_free, to_lam, to_gate = gates.backward((grad,), (mean, free, lam, gate, eps), (), (True,) * 5)
    read = mean, free, log_z, again, shift[1][:, None], shift[2][:, None]
    given = q, k, v, beta, None, None, None, causal, None, scale
    found = one_pass.backward((to_mean, to_free), given, read, (True,) * 4 + (False,) * 6, streams_kernels)
    return *found[:4], to_lam, to_gate


def _attend(q: Tensor, k: Tensor, streams: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Sums [B, T, H, 2 D], and what the backward wants: the weights, or log-normalizers where half of them are zero."""
    if not causal:
        return _products(q, k, streams, scale)
    qh, kh, sh = (x.transpose(1, 2) for x in (q, k, streams))
    out, log_z = attend(qh, kh, sh, None, True, scale)
    return out.transpose(1, 2), log_z


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, streams: Tensor, sums: Tensor, norms: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k and the streams."""
    scale = q.shape[3] ** -0.5
    if not causal:
        return _products_backward(grad, q, k, streams, norms, scale)
    by_sums, qh, kh, sh, out = (x.transpose(1, 2) for x in (grad, q, k, streams, sums))
    found = attend_backward(by_sums, Attended(qh, kh, sh, None, True, scale, out, norms))
    return tuple(x.transpose(1, 2) for x in found[:3])


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of [B, T, H, W] tensors to all tokens by matrix products -> (output, weights [H, B, T, T]).

    For short sequences: with the weights kept the backward is a third faster than that of torch's kernel.
    """
    batch, length, heads = q.shape[:3]
    weights = q.new_empty(heads, batch, length, k.shape[1])
    out = q.new_empty(heads, batch, length, v.shape[3])
    for h, p in enumerate(weights):  # head by head, whose weights stay in the cache
        torch.baddbmm(p, q[:, :, h], k[:, :, h].mT, beta=0, alpha=scale, out=p)
        torch.ops.aten._softmax.out(p, -1, False, out=p)
        torch.bmm(p, v[:, :, h], out=out[h])
    return out.permute(1, 2, 0, 3), weights


def _products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    slope = torch.empty_like(weights[0])
    dq, dk, dv = (x.new_empty(x.shape[2], x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v))
    for h, p in enumerate(weights):
        torch.bmm(grad[:, :, h], v[:, :, h].mT, out=slope)
        torch.ops.aten._softmax_backward_data.out(slope, p, -1, slope.dtype, grad_input=slope)
        torch.baddbmm(dq[h], slope, k[:, :, h], beta=0, alpha=scale, out=dq[h])
        torch.baddbmm(dk[h], slope.mT, q[:, :, h], beta=0, alpha=scale, out=dk[h])
        torch.bmm(p.mT, grad[:, :, h], out=dv[h])
    return dq.permute(1, 2, 0, 3), dk.permute(1, 2, 0, 3), dv.permute(1, 2, 0, 3)
