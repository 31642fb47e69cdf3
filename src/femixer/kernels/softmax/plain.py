"""The softmax read in one call of torch's attention, and its backward, on any device.

    mu = sum_i p(i) v_i,   F = top + log(sum_i p(i) exp(beta (v_i - top))) / beta

`top` is the channel's largest value in the sequence. The streams v and exp(beta (v - top)) lie side by side, so one
attention call serves both. A row that cannot see `top` may find a sum too small for the number format.

On a CPU the result is exact at any range: the sums are looked at, and heads for which they are doubtful are read again
by `exact`, in float64. Elsewhere, and under compilers and torch.func, nothing is asked of the device, and F is within
1e-5 max(1, |F|) where

    beta (top - F) <= 60  (float32),   beta >= 0.1 or beta (top - bottom) <= 2,   top - F <= 40 max(1, |F|).

Beyond the first bound F is mu, so that mu <= F <= max holds and results and gradients are finite everywhere.

What is done around attention is given as `steps`: `femixer.kernels.streams` or its compiled twin.
Axes: B batch, T queries, S keys, H heads, G key/value heads (H = G * repeats), E key width, D value width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels import streams as torch_streams
from femixer.kernels.operator import filled
from femixer.kernels.softmax import decays, exact
from femixer.kernels.softmax.attention import Attended, attend, attend_backward, fold, heads_first, widths
from femixer.kernels.softmax.decays import Sums
from femixer.kernels.softmax.exact import Gradients
from femixer.kernels.softmax.visibility import Visibility, pieces
from femixer.kernels.streams import Shift, readable

# Sequences up to this length are read backwards in one call for all heads.
SHORT = 256


def forward(*arguments: Any, steps: Any = torch_streams) -> tuple[Tensor, ...]:
    q, k, v, beta, *visible, scale = arguments
    seen = Visibility(*visible)
    batch, _, heads, _ = q.shape
    span = shift = None
    if beta is not None:
        span, shift = torch_streams.value_range(v, beta, seen.segments_k)
    streams = steps.value_streams(v, beta, shift)
    key_width, value_width = widths(q.device, q.shape[-1], streams.shape[-1])
    qh, kh = heads_first(q, heads, key_width), heads_first(k, heads, key_width)
    sh = heads_first(streams, heads, value_width)
    outs, logs, padding = [], [], seen.padding()
    for rows, keys, mask, triangular in pieces(q, k, seen):
        out, log_z = attend(qh[:, :, rows], kh[:, :, keys], sh[:, :, keys], mask, triangular, scale)
        outs.append(out.transpose(1, 2))
        logs.append(log_z)
        del mask  # before the next one is made
    sums = (outs[0] if len(outs) == 1 else torch.cat(outs, 1))[..., : streams.shape[-1]]
    log_z = logs[0] if len(logs) == 1 else torch.cat(logs, 2)
    again = torch.zeros(batch, heads, dtype=torch.bool, device=q.device)
    if beta is None or shift is None or span is None:
        mean = sums if padding is None else sums.masked_fill(padding, 0)
        free, top, base = (q.new_empty(0) for _ in range(3))
        return mean, free, log_z, again, top, base
    if padding is not None:
        sums = sums.masked_fill(padding, 1)
    mean, free, doubtful = steps.read_sums(sums, beta, shift, span)
    if doubtful is not None:
        again = doubtful
        if bool(again.any()):
            exact.read_again(free, again, (q, k, v, beta), seen, scale)
            free = torch.maximum(free, mean)
    if padding is not None:
        mean, free = mean.masked_fill(padding, 0), free.masked_fill(padding, 0)
    return mean, free, log_z, again, shift.top, shift.base


class Part(NamedTuple):
    """Some heads of a read, their results, and the gradients of these: that of the log-normalizers where somebody reads
    them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    mean: Tensor
    free: Tensor
    log_z: Tensor
    again: Tensor | None
    shift: Shift | None
    to_mean: Tensor
    to_free: Tensor
    to_log_z: Tensor | None

    def at(self, heads: slice, groups: slice) -> Part:
        beta, shift, free, to_free = self.beta, self.shift, self.free, self.to_free
        if beta is not None and shift is not None:
            beta, shift, free, to_free = beta[groups], shift.at(groups), free[:, :, heads], to_free[:, :, heads]
        q, mean, to_mean = (x[:, :, heads] for x in (self.q, self.mean, self.to_mean))
        again, to_log_z = (None if x is None else x[:, heads] for x in (self.again, self.to_log_z))
        k, v, log_z = self.k[:, :, groups], self.v[:, :, groups], self.log_z[:, heads]
        return Part(q, k, v, beta, mean, free, log_z, again, shift, to_mean, to_free, to_log_z)


def backward(
    grads: tuple[Tensor | None, ...],
    arguments: tuple[Any, ...],
    results: tuple[Tensor, ...],
    needed: tuple[bool, ...],
    steps: Any = torch_streams,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta, bias, and None for the segments. grads: of mean and free energy, and of the
    log-normalizers if they are given."""
    q, k, v, beta, bias, segments_q, segments_k, causal, window, scale = arguments
    mean, free, log_z, again, top, base = results
    seen = Visibility(bias, segments_q, segments_k, causal, window)
    grad_mean, grad_free = filled(grads[:2], results)
    bias_grad = bias is not None and needed[4]
    shift = None if beta is None else Shift(top, base)
    some = readable(again) and bool(again.any())
    # Masks are made once, so where they are needed all heads go together.
    together = not seen.needs_no_mask(k.shape[1])
    if (padding := seen.padding()) is not None:
        grad_mean = grad_mean.masked_fill(padding, 0)
        if shift is not None:
            grad_free = grad_free.masked_fill(padding, 0)
            # A padding row's F is zero, which may lie anywhere to the others; at top nothing over- or underflows.
            free = torch.where(padding, shift.per_head(q.shape[2] // k.shape[2]).top, free)
    to_log_z = grads[2] if len(grads) > 2 else None
    apart = again if some else None
    part = Part(q, k, v, beta, mean, free, log_z, apart, shift, grad_mean, grad_free, to_log_z)
    if some and bool(again.all()):
        dbeta = None if beta is None else torch.zeros_like(beta)
        found = Gradients(_zeros(q), _zeros(k), _zeros(v), dbeta, _zeros(bias) if bias_grad else None)
    elif together:
        found = _one_pass_backward(part, seen, scale, bias_grad, steps)
    else:
        found = _by_heads(part, seen, scale, steps)
    if some:
        exact.add_gradients(found, again, (q, k, v, beta), seen, scale, (grad_mean, grad_free, to_log_z))
    return *found, None, None


def _by_heads(part: Part, seen: Visibility, scale: float, steps: Any) -> Gradients:
    """A few heads at a time, where it pays."""
    slices = _head_slices(part.q, part.k)
    if len(slices) < 2:
        return _one_pass_backward(part, seen, scale, False, steps)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (part.q, part.k, part.v))
    dbeta = None if part.beta is None else torch.empty_like(part.beta)
    for heads, groups in slices:
        found = _one_pass_backward(part.at(heads, groups), seen, scale, False, steps)
        dq[:, :, heads], dk[:, :, groups], dv[:, :, groups] = found.q, found.k, found.v
        if dbeta is not None and found.beta is not None:
            dbeta[groups] = found.beta
    return Gradients(dq, dk, dv, dbeta, None)


def _head_slices(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Heads of queries and of keys whose backward is done together: on a CPU as few as load its threads evenly, because
    what the backward holds besides its results grows with them. Short sequences have little to hold, and calls cost
    more."""
    groups, repeats = k.shape[2], q.shape[2] // k.shape[2]
    if q.device.type != "cpu" or k.shape[1] <= SHORT:
        return []
    threads = torch.get_num_threads()
    together = min(groups, threads // math.gcd(threads, q.shape[0] * repeats))
    starts = range(0, groups, together)
    return [(slice(s * repeats, (s + together) * repeats), slice(s, s + together)) for s in starts]


def _one_pass_backward(part: Part, seen: Visibility, scale: float, bias_grad: bool, steps: Any) -> Gradients:
    """From the heads that were read in one pass."""
    q, k, v, beta = part[:4]
    heads, groups, d = q.shape[2], *v.shape[2:]
    streams = steps.value_streams(v, beta, part.shift)
    inner, sums, dbeta = part.to_mean, part.mean, None
    if beta is not None:
        read = part.to_mean, part.to_free, part.mean, part.free
        inner, sums, dbeta = steps.undo_read(*read, beta, part.shift, part.again)
    if part.to_log_z is not None:
        # dlog Z / dscores is p: the gradient of a channel of zeros whose read is taken to be -to_log_z.
        to_log_z = part.to_log_z.transpose(1, 2)[..., None]
        if part.again is not None:
            to_log_z = to_log_z.masked_fill(part.again[:, None, :, None], 0)
        inner, sums = torch.cat([inner, torch.ones_like(to_log_z)], -1), torch.cat([sums, -to_log_z], -1)
        streams = F.pad(streams, (0, 1))
    # Sums of decays have the gradients of scores. Those of a row's keys add up to nothing, those of a key's rows to the
    # gradient of one more channel, in which queries are one and keys, so far, zero.
    add_up = bias_grad and seen.decays and seen.causal and part.to_log_z is None
    key_width, value_width = widths(q.device, q.shape[-1] + add_up, streams.shape[-1])
    qh, kh = heads_first(q, heads, key_width, 1 / scale if add_up else 0.0), heads_first(k, heads, key_width)
    sh, inner = heads_first(streams, heads, value_width), heads_first(inner, heads, value_width)
    sums = heads_first(sums, heads, value_width)
    of_rows: dict[int, Tensor] = {}
    of_keys: list[Tensor] = []
    dbias = _zeros(seen.bias) if bias_grad and seen.bias is not None else None
    # The last one first: its keys are all.
    for rows, keys, mask, triangular in pieces(q, k, seen, last_first=True):
        given = qh[:, :, rows], kh[:, :, keys], sh[:, :, keys], mask, triangular, scale
        call = Attended(*given, sums[:, :, rows], part.log_z[:, :, rows])
        to_q, to_k, to_streams, to_mask = attend_backward(inner[:, :, rows], call, bias_grad and not add_up)
        del given, call, mask  # before the next one is made
        if dbias is not None and add_up:
            Sums.of(dbias).until[..., keys].sub_(to_k[..., q.shape[3]])
        elif dbias is not None and to_mask is not None:
            _put_bias(dbias, to_mask, rows, keys, q.shape[1], seen)
        of_rows[rows.start] = fold(to_q, heads, q.shape[3])
        grads = fold(to_k, groups, q.shape[3]), fold(to_streams, groups, streams.shape[3])
        if grads[0].shape[1] == k.shape[1] and not of_keys:
            of_keys = list(grads)
            continue
        of_keys = of_keys or [_zeros(k), _zeros(streams)]
        for total, grad in zip(of_keys, grads, strict=True):
            total[:, keys].add_(grad)
    dq, (dk, dstreams) = of_rows[0], of_keys
    if len(of_rows) > 1:
        dq = torch.cat([of_rows[start] for start in sorted(of_rows)], 1)
    dv = dstreams[..., :d]
    if beta is not None and dbeta is not None:
        dv, to_beta = steps.undo_streams(dstreams[..., : 2 * d], streams[..., : 2 * d], v, beta, part.shift)
        dbeta = dbeta + to_beta
    return Gradients(dq.contiguous(), dk.contiguous(), dv.contiguous(), dbeta, dbias)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _put_bias(total: Tensor, grad: Tensor, rows: slice, keys: slice, queries: int, seen: Visibility) -> None:
    """The gradient [B, H, rows, keys] of the scores into that of the bias."""
    if not seen.decays:
        total[:, :, rows, keys] = grad
        return
    index = torch.arange(total.shape[2] // 2, device=total.device)
    offset = len(index) - queries
    tokens = slice(rows.start + offset, rows.stop + offset)
    to_rows, to_keys = decays.gradients(grad, seen.ahead(tokens, keys, index))
    decays.add_(total, to_rows, tokens)
    decays.add_(total, to_keys, keys)
