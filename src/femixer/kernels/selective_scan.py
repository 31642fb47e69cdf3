"""The selective scan: diagonal state spaces per channel whose step, write and read depend on the token (Mamba).

    h_t[n] = exp(step_t rate[n]) h_{t-1}[n] + step_t write_t[n] x_t,    y_t = sum_n read_t[n] h_t[n],    rate <= 0

write and read have any sign and nothing is normalized; for positive weights and their mean see `state_space`.

Axes: B batch, T tokens, C channels, N modes per channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.kernels.backend import array, compiled, native, or_empty
from femixer.kernels.precision import without_autocast
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import PADDING, START

BLOCK = 32  # tokens whose modes the plain path computes at a time


def selective_scan(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y [B, T, C], the state after the last token [B, N, C]), in float32 at least.

    rate [N, C]; step, x [B, T, C]; write, read [B, T, N]; marks [B, T] (see femixer.layout); state [B, N, C].
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    rate, step, write, read, x = (part.to(dtype) for part in (rate, step, write, read, x))
    state = x.new_zeros(x.shape[0], *rate.shape) if state is None else state
    with without_autocast(x.device):
        if not compiled(x):
            return _plain(rate, step, write, read, x, marks, state)
        parts = (part.contiguous() for part in (rate, step, write, read, x))
        y, last, _ = _scan(*parts, None if marks is None else marks.contiguous(), state.contiguous())
        return y, last


def _plain(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, some tokens at a time."""
    marks = torch.zeros(x.shape[:2], dtype=torch.int8, device=x.device) if marks is None else marks
    results = []
    for d, u, b, c, mark in zip(*(part.split(BLOCK, 1) for part in (step, x, write, read, marks)), strict=True):
        padding, start = (mark == PADDING)[..., None, None], (mark == START)[..., None, None]
        log_decay = (d[:, :, None] * rate).masked_fill(padding, 0).masked_fill(start, -torch.inf)
        inputs = ((d * u)[:, :, None] * b[..., None]).masked_fill(padding, 0)
        h = linear_recurrence(log_decay.exp().flatten(2), inputs.flatten(2), state.flatten(1))
        h = h.unflatten(2, rate.shape)
        state = h[:, -1]
        results.append((h * c[..., None]).sum(2).masked_fill(padding[..., 0], 0))
    return torch.cat(results, 1), state.clone()


@torch.library.custom_op("femixer::selective_scan", mutates_args=())
def _scan(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> y, the last state, and states [B, chunks, N, C] to go back from."""
    kernels = native("selective_scan")
    y, last = torch.empty_like(x), torch.empty_like(state)
    kept = x.new_empty(x.shape[0], -(-x.shape[1] // kernels.ROWS), *rate.shape)
    kernels.forward(*map(array, (rate, step, write, read, x, or_empty(marks), state, y, last, kept)))
    return y, last, kept


@_scan.register_fake
def _(
    rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, marks: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kept = x.new_empty(x.shape[0], -(-x.shape[1] // native("selective_scan").ROWS), *rate.shape)
    return torch.empty_like(x), torch.empty_like(state), kept


@torch.library.custom_op("femixer::selective_scan_backward", mutates_args=())
def _scan_backward(
    to_y: Tensor,
    to_last: Tensor,
    rate: Tensor,
    step: Tensor,
    write: Tensor,
    read: Tensor,
    x: Tensor,
    marks: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    kernels = native("selective_scan")
    d_step, d_x, d_state = torch.empty_like(x), torch.empty_like(x), torch.empty_like(to_last)
    d_rate = x.new_empty(x.shape[0], *rate.shape, dtype=torch.float64)
    shares = [x.new_empty(x.shape[0], -(-x.shape[2] // kernels.LANES), *write.shape[1:]) for _ in range(2)]
    arguments = (rate, step, write, read, x, or_empty(marks), kept, to_y, to_last)
    kernels.backward(*map(array, (*arguments, d_rate, d_step, *shares, d_x, d_state)))
    d_write, d_read = (share.sum(1) for share in shares)
    return d_rate.sum(0).to(rate.dtype), d_step, d_write, d_read, d_x, d_state


@_scan_backward.register_fake
def _(
    to_y: Tensor, to_last: Tensor, rate: Tensor, step: Tensor, write: Tensor, read: Tensor, x: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = (rate, x, write, read, x, to_last)
    return tuple(torch.empty_like(part) for part in like)  # type: ignore[return-value]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:6], output[2])
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, to_y, to_last, _):  # type: ignore[no-untyped-def]
    *grads, d_state = _scan_backward(to_y.contiguous(), to_last.contiguous(), *ctx.saved_tensors)
    return *grads, None, d_state


_scan.register_autograd(_backward, setup_context=_setup)
