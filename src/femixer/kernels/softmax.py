"""The softmax prior's read: mean and free energy in one pass of scaled dot-product attention.

    mu = sum_i p(i) v_i,   F = top + log(sum_i p(i) exp(beta (v_i - top))) / beta

`top` is the channel's largest value in the sequence. The streams v and exp(beta (v - top)) lie side by side, so one
attention call serves both. A row that cannot see `top` may find a sum too small for the number format; the sums
themselves show it, and the heads concerned are read again by `blocked`, which is exact at any range. That choice and
the hand-written backward are one operator, so it neither breaks a torch.compile graph nor stores the streams.

Axes: B batch, T queries, S keys, H heads, G key/value heads (H = G * repeats), E key width, D value width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from femixer.kernels import blocked, short
from femixer.kernels.attend import Geometry, Piece, attend, attend_backward, pieces
from femixer.kernels.backend import eager_kernels
from femixer.kernels.function import run
from femixer.kernels.precision import without_autocast
from femixer.kernels.streams import Shift, read_sums, undo_read, undo_streams, value_range, value_streams

# Sequences up to this length are read backwards in one call for all heads.
SHORT = 256


def softmax_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    bias: Tensor | None = None,
    runs: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mean and free energy [B, T, H, D] of v under softmax(q k * scale + bias); the free energy only if beta is given.

    q [B, T, H, E]; k [B, S, G, E]; v [B, S, G, D]; beta [G, D] > 0. Causal queries are the last T of the S tokens.
    window: a query sees keys less than `window` real tokens away. bias: broadcastable to [B, H, T, S].
    runs: (queries [B, T], keys [B, S]) integers; a query sees the keys of its own run; negative is padding.
    """
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    run_q, run_k = (None, None) if runs is None else runs
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[0] == 0 or q.shape[1] == 0:
        nothing = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return nothing, None if beta is None else nothing
    with without_autocast(q.device):
        # What only pretends to be a tensor needs the operator, which knows the shapes of its results.
        eager = type(q) is Tensor and q.device.type != "meta" and not torch.compiler.is_compiling()
        arguments = q, k, v, beta, bias, run_q, run_k, causal, window, scale
        mean, free, *_ = run(Read, *arguments, True) if eager else _read(*arguments, False)
    return mean, None if beta is None else free


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _heads_first(x: Tensor, heads: int, width: int) -> Tensor:
    """[B, S, G, W] -> [B, H, S, width]: key/value heads repeated, width padded with zeros."""
    x = _widen(x, width).transpose(1, 2)
    if x.shape[1] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[1], 1)


def _fold(x: Tensor, groups: int, width: int) -> Tensor:
    """The transpose of _heads_first: [B, H, S, W] -> [B, S, G, width], repeats summed."""
    if x.shape[1] != groups:
        x = x.unflatten(1, (groups, -1)).sum(2)
    return x.transpose(1, 2)[..., :width]


def _read_now(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    run_q: Tensor | None,
    run_k: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    share: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """share: mean and free energy may be parts of one tensor, which results of an operator may not.

    -> (mean, free energy [B, T, H, D], log-normalizers [B, H, T], heads read by `blocked` [B, H], top and base of
    the streams' shift)."""
    h, e, d = *q.shape[2:], v.shape[-1]
    geometry = Geometry(bias, run_q, run_k, causal, window)
    if short.is_short(q, k, v, geometry):
        top, base = (q.new_empty(0 if beta is None else (q.shape[0], 1, *v.shape[2:])) for _ in range(2))
        return *short.read(q, k, v, beta, geometry, scale), torch.zeros(q.shape[0], h, dtype=torch.bool), top, base
    span = shift = None
    if beta is not None:
        span, shift = value_range(v, beta, run_k)
    streams = value_streams(v, beta, shift)
    used = streams.shape[-1]
    width = max(e, used)
    qh, kh, sh = (_heads_first(x, h, width) for x in (q, k, streams))
    outs, logs = [], []
    for rows, keys, mask, triangular in pieces(q, k, geometry):
        o, log_z = attend(qh[:, :, rows], kh[:, :, keys], sh[:, :, keys], mask, triangular, scale)
        outs.append(o.transpose(1, 2))
        logs.append(log_z)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    log_z = logs[0] if len(logs) == 1 else torch.cat(logs, 2)
    padding = None if run_q is None else (run_q < 0)[..., None, None]
    if beta is None or shift is None or span is None:
        mean, (free, top, base) = out[..., :d], (q.new_empty(0) for _ in range(3))
        exact = torch.zeros(q.shape[0], h, dtype=torch.bool, device=q.device)
    else:
        sums = out[..., :used]
        if padding is not None:
            sums = sums.masked_fill(padding, 1)
        mean, free, exact = read_sums(sums, beta, shift, span)
        top, base = shift.top, torch.zeros_like(shift.top) if shift.base is None else shift.base
        if bool(exact.any()):
            for job in blocked.jobs(exact, q, k, v, beta, geometry, scale):
                job.put(free, blocked.free_energy(job.sequences))
            torch.maximum(free, mean, out=free)
        if padding is not None:
            free.masked_fill_(padding, 0)
    if padding is not None:
        mean.masked_fill_(padding, 0)
    if not share:
        mean, free, top, base = (x.clone(memory_format=torch.contiguous_format) for x in (mean, free, top, base))
    return mean, free, log_z, exact, top, base


_read = torch.library.custom_op("femixer::softmax_read", mutates_args=())(_read_now)


@_read.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *_: object) -> tuple[Tensor, ...]:
    b, t, h = q.shape[:3]
    mean = q.new_empty(b, t, h, v.shape[-1])
    free = q.new_empty(0) if beta is None else torch.empty_like(mean)
    top, base = (q.new_empty(0 if beta is None else (b, 1, *v.shape[2:])) for _ in range(2))
    return mean, free, q.new_empty(b, t, h).transpose(1, 2), q.new_empty(b, h, dtype=torch.bool), top, base


class Part(NamedTuple):
    """Some heads of a read and their results."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    mean: Tensor
    free: Tensor | None
    log_z: Tensor
    exact: Tensor | None
    shift: Shift | None


def _head_slices(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Heads of queries and of keys whose backward is done together: on a CPU as few as load its threads evenly, because
    what the backward holds besides its results grows with them. Short sequences have little to hold, and calls cost
    more."""
    groups, repeats = k.shape[2], q.shape[2] // k.shape[2]
    together = groups
    if q.device.type == "cpu" and k.shape[1] > SHORT:
        threads = torch.get_num_threads()
        together = min(groups, threads // math.gcd(threads, q.shape[0] * repeats))
    starts = range(0, groups, together)
    return [(slice(s * repeats, (s + together) * repeats), slice(s, s + together)) for s in starts]


def _one_pass_backward(
    part: Part, grad_mean: Tensor, grad_free: Tensor | None, calls: Iterable[Piece], scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """-> gradients of q, k, v and beta from the heads that were read in one pass."""
    q, k, v, beta = part[:4]
    h, e, groups, d = *q.shape[2:], *v.shape[2:]
    streams = value_streams(v, beta, part.shift)
    used = streams.shape[-1]
    width = max(e, used)
    inner, sums, dbeta = grad_mean, part.mean, None
    if grad_free is not None and part.shift is not None:
        assert beta is not None
        assert part.free is not None
        inner, sums, dbeta = undo_read(grad_mean, grad_free, part.mean, part.free, beta, part.shift, part.exact)
    qh, kh, sh = (_heads_first(x, h, width) for x in (q, k, streams))
    inner, sums = (_widen(x, width).transpose(1, 2) for x in (inner, sums))
    totals: list[Tensor] = []
    for rows, keys, mask, triangular in calls:
        a, b, c = attend_backward(
            inner[:, :, rows],
            qh[:, :, rows],
            kh[:, :, keys],
            sh[:, :, keys],
            sums[:, :, rows],
            part.log_z[:, :, rows],
            mask,
            triangular,
            scale,
        )
        grads = [a.transpose(1, 2)[..., :e], _fold(b, groups, e), _fold(c, groups, used)]
        if grads[0].shape[1] == q.shape[1] and grads[1].shape[1] == k.shape[1]:
            totals = grads  # one call did it all
            break
        if not totals:
            totals = [torch.zeros_like(x) for x in (q, k, streams)]
        for total, at, grad in zip(totals, (rows, keys, keys), grads, strict=True):
            total[:, at] += grad
    dq, dk, dstreams = totals
    dv = dstreams[..., :d]
    if beta is not None and dbeta is not None and part.shift is not None:
        dv, to_beta = undo_streams(dstreams, streams, v, beta, part.shift)
        dbeta = dbeta + to_beta
    return dq, dk, dv, dbeta


def gradients_now(
    grad_mean: Tensor,
    grad_free: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    run_q: Tensor | None,
    run_k: Tensor | None,
    mean: Tensor,
    free: Tensor,
    log_z: Tensor,
    exact: Tensor,
    top: Tensor,
    base: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    geometry = Geometry(bias, run_q, run_k, causal, window)
    if short.is_short(q, k, v, geometry):
        grads = short.gradients(grad_mean, grad_free, q, k, v, beta, geometry, scale, mean, log_z)
        return *grads, q.new_empty(0)
    if bias_grad:
        # The attention kernel has no gradient for its mask; the blocked read has.
        exact = torch.ones_like(exact)
    if run_q is not None:
        padding = (run_q < 0)[..., None, None]
        grad_mean = grad_mean.masked_fill(padding, 0)
        grad_free = None if grad_free is None else grad_free.masked_fill(padding, 0)
    dbeta = q.new_empty(0) if beta is None else torch.zeros_like(beta)
    apart = bool(exact.any())
    if apart and bool(exact.all()):
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    else:
        # Without a base plain torch has less to do; compiled kernels have not.
        shift = None if beta is None else Shift(top, base if eager_kernels(v) or bool(base.any()) else None)
        if shift is not None and run_q is not None:
            # A padding row's F is zero, which may lie anywhere to the others; at top nothing over- or underflows.
            free = torch.where((run_q < 0)[..., None, None], shift.per_head(q.shape[2] // k.shape[2]).top, free)
        # Masks are made once, so where they are needed all heads go together.
        together = _head_slices(q, k) if geometry.needs_no_mask(k.shape[1]) else [(slice(None), slice(None))]
        if len(together) > 1:
            dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for hs, gs in together:
            part = Part(
                q[:, :, hs],
                k[:, :, gs],
                v[:, :, gs],
                None if beta is None else beta[gs],
                mean[:, :, hs],
                None if beta is None else free[:, :, hs],
                log_z[:, hs],
                exact[:, hs] if apart else None,
                None if shift is None else shift.at(gs),
            )
            to_free = None if grad_free is None else grad_free[:, :, hs]
            results = _one_pass_backward(part, grad_mean[:, :, hs], to_free, pieces(q, k, geometry), scale)
            if len(together) == 1:
                dq, dk, dv = (x.contiguous() for x in results[:3])
            else:
                dq[:, :, hs], dk[:, :, gs], dv[:, :, gs] = results[:3]
            if results[3] is not None:
                dbeta[gs] = results[3]
    dbias = q.new_empty(0)
    if bias_grad and bias is not None:
        dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
    if apart:
        for job in blocked.jobs(exact, q, k, v, beta, geometry, scale):
            to_free = None if grad_free is None else job.take(grad_free)
            result = blocked.gradients(job.sequences, job.take(grad_mean), to_free)
            job.put(dq, result.q)
            job.add_keys(dk, result.k)
            job.add_keys(dv, result.v)
            if result.beta is not None:
                dbeta.index_add_(0, job.group, result.beta.to(dbeta.dtype))
            if bias_grad and result.bias is not None:
                where = job.batch[:, None, None], job.head[:, None, None], job.rows[:, None], job.keys
                dbias[where] = result.bias.to(dbias.dtype)
    return dq, dk, dv, dbeta, dbias


_gradients = torch.library.custom_op("femixer::softmax_read_backward", mutates_args=())(gradients_now)


@_gradients.register_fake
def _(
    grad_mean: Tensor,
    grad_free: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbeta = q.new_empty(0) if beta is None else torch.empty_like(beta)
    dbias = q.new_empty(0)
    if rest[-1] and bias is not None:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    return dq, dk, dv, dbeta, dbias


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.causal, ctx.window, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])


def _backward_by(gradients):  # type: ignore[no-untyped-def]
    def backward(ctx, grad_mean, grad_free, *_):  # type: ignore[no-untyped-def]
        q, k, v, beta, bias, *rest = ctx.saved_tensors
        grad_free = None if beta is None else grad_free.contiguous()
        bias_grad = bias is not None and ctx.needs_input_grad[4]
        options = ctx.causal, ctx.window, ctx.scale, bias_grad
        with without_autocast(q.device):
            dq, dk, dv, dbeta, dbias = gradients(
                grad_mean.contiguous(), grad_free, q, k, v, beta, bias, *rest, *options
            )
        return dq, dk, dv, dbeta if beta is not None else None, dbias if bias_grad else None, *[None] * 6

    return backward


_read.register_autograd(_backward_by(_gradients), setup_context=_setup)


class Read(torch.autograd.Function):
    """The operator without its dispatch, which takes longer than the read of a short sequence."""

    forward = staticmethod(_read_now)
    setup_context = staticmethod(_setup)
    backward = staticmethod(once_differentiable(_backward_by(gradients_now)))  # type: ignore[assignment]
