"""The softmax read of up to some hundred tokens together with its gates, as few compiled kernels around attention.

What `femixer.kernels.softmax` and `femixer.kernels.gating` do one after the other, for the plain case: every token is
real and sees all others (or all before it), all heads have keys of their own, and queries are as wide as both streams.
There the calls of a dozen small steps, and the memory between them, take as long as the steps themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femixer.kernels import blocked, short, softmax
from femixer.kernels.attend import Geometry, attend, attend_backward, products, products_backward
from femixer.kernels.backend import array, eager_kernels, memory, native
from femixer.kernels.function import run
from femixer.kernels.gating import GatedRead, gradients_of_gates
from femixer.kernels.precision import without_autocast
from femixer.kernels.streams import LIMITS, NARROW


def serves(heads: int, width: int, v: Tensor, lam: Tensor | None, gate: Tensor | None) -> bool:
    """Whether `gated_softmax` is for these heads of queries and keys of some width; v [B, T, G, D]."""
    length, groups, channels = v.shape[1:]
    if lam is None or gate is None or type(v) is not Tensor:
        return False
    if length > softmax.SHORT or groups != heads or width != 2 * channels:
        return False
    if length <= short.LENGTH and width <= short.WIDTH:  # all of it is one kernel there
        return False
    return lam.dtype == gate.dtype == v.dtype and eager_kernels(v)


def gated_softmax(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lam: Tensor, gate: Tensor, causal: bool, eps: float
) -> Tensor:
    """The gated read [B, T, H, D]; beta [H, D], lam and gate [B, T, H, D] logits, eps of the gate's norm."""
    with without_autocast(q.device):
        read, *_ = run(GatedSoftmax, q, k, v, beta, lam, gate, causal, q.shape[-1] ** -0.5, eps)
    return read


class GatedSoftmax(torch.autograd.Function):
    """-> (gated read; sums (mu | total - base), F, the streams; what `_attend` keeps; heads that were read again, or
    none; shift), all kept: sequences are short."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, lam: Tensor, gate: Tensor, causal: bool, scale: float, eps: float
    ) -> tuple[Tensor, ...]:
        b, t, h, d = v.shape
        shift, streams = v.new_empty(3, b, h, d), v.new_empty(b, t, h, 2 * d)
        free, read = v.new_empty(2, b, t, h, d)
        inverse, ranges, doubtful = array(beta.contiguous()), array(shift), np.zeros((b, h), dtype=np.bool_)
        kernels = native("gated_softmax")
        kernels.forward_streams(*memory(v), inverse, NARROW, ranges, array(streams))
        sums, norms = _attend(q, k, streams, causal, scale)
        given = *memory(sums, lam, gate), inverse, ranges, LIMITS, eps
        kernels.forward(*given, doubtful, array(free), array(read))
        exact = q.new_empty(0, dtype=torch.bool)
        if doubtful.any():
            exact = torch.from_numpy(doubtful)
            for job in blocked.jobs(exact, q, k, v, beta, Geometry(None, None, None, causal, None), scale):
                job.put(free, blocked.free_energy(job.sequences))
            torch.maximum(free, sums[..., :d], out=free)
            read = GatedRead.forward(sums[..., :d], free, lam, gate, eps)
        return read, sums, free, streams, norms, exact, shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.causal, ctx.scale, ctx.eps = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: what recomputes them may not be asked twice
        q, k, v, beta, lam, gate, sums, free, streams, norms, exact, shift = saved
        if exact.numel():
            return *_gradients_in_steps(grad, saved, ctx.causal, ctx.scale, ctx.eps), None, None, None
        inner, d_beta = torch.empty_like(streams), v.new_empty(shift.shape[1:])
        dv, to_lam, to_gate = v.new_empty(3, *v.shape)
        inverse, ranges, to_beta = array(beta.contiguous()), array(shift), array(d_beta)
        kernels, given = native("gated_softmax"), (*memory(sums, lam, gate), array(free), array(grad.contiguous()))
        kernels.backward(*given, inverse, ranges, ctx.eps, *map(array, (inner, to_lam, to_gate)), to_beta)
        with without_autocast(q.device):
            dq, dk, to_streams = _attend_backward(inner, q, k, streams, sums, norms, ctx.causal, ctx.scale)
        kernels.backward_streams(*memory(to_streams, streams, v), inverse, ranges, array(dv), to_beta)
        return dq, dk, dv, d_beta.sum(0), to_lam, to_gate, None, None, None


def _attend(q: Tensor, k: Tensor, streams: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Sums [B, T, H, 2 D], and what the backward wants: the weights, or log-normalizers where half of them are zero."""
    if not causal:
        return products(q, k, streams, scale)
    qh, kh, sh = (x.transpose(1, 2) for x in (q, k, streams))
    out, log_z = attend(qh, kh, sh, None, True, scale)
    return out.transpose(1, 2), log_z


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, streams: Tensor, sums: Tensor, norms: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of q, k and the streams."""
    if not causal:
        return products_backward(grad, q, k, streams, norms, scale)
    by_sums, qh, kh, sh, out = (x.transpose(1, 2) for x in (grad, q, k, streams, sums))
    grads = attend_backward(by_sums, qh, kh, sh, out, norms, None, True, scale)
    return tuple(x.transpose(1, 2) for x in grads)


def _gradients_in_steps(
    grad: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float, eps: float
) -> tuple[Tensor, ...]:
    """Where heads were read again: first through the gates, then through the read."""
    q, k, v, beta, lam, gate, sums, free, streams, log_z, exact, shift = saved
    mean = sums[..., : v.shape[3]]
    if not causal:
        log_z = attend(q.transpose(1, 2), k.transpose(1, 2), streams.transpose(1, 2), None, False, scale)[1]
    to_mean, to_free, to_lam, to_gate = gradients_of_gates(grad, mean, free, lam, gate, eps)
    top, base = shift[1][:, None], shift[2][:, None]
    given = q, k, v, beta, None, None, None, mean, free, log_z, exact, top, base, causal, None, scale, False
    with without_autocast(q.device):
        dq, dk, dv, d_beta, _ = softmax.gradients_now(to_mean, to_free, *given)
    return dq, dk, dv, d_beta, to_lam, to_gate
