"""The elementwise linear recurrence h_t = decay_t * h_{t-1} + input_t along dim 1 of [B, T, ...]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from femixer.kernels.backend import array, compiled, native


def linear_recurrence(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
    """h [B, T, C] with h_0 = decay_0 * initial + inputs_0; decay and inputs [B, T, C], initial [B, C].

    Only products of decays are formed, never quotients or exponentials of sums, so it is exact at any length.
    """
    if inputs.shape[1] == 1:
        return torch.addcmul(inputs, decay, initial[:, None])
    return _recurrence(decay.contiguous(), inputs.contiguous(), initial.contiguous())


def _sweep(decay: Tensor, h: Tensor, initial: Tensor) -> Tensor:
    """h [B, T, C] holds the inputs and receives the result. About sqrt(T) steps over chunks side by side, twice."""
    batch, length, width = h.shape
    chunk = max(1, math.isqrt(length))
    whole = length // chunk * chunk
    if whole:
        a = decay[:, :whole].reshape(batch, whole // chunk, chunk, width)
        # A view: whole chunks of h are updated in place.
        x = h[:, :whole].unflatten(1, (whole // chunk, chunk))
        reach = torch.empty_like(a)
        reach[:, :, 0] = a[:, :, 0]
        for i in range(1, chunk):
            torch.mul(a[:, :, i], reach[:, :, i - 1], out=reach[:, :, i])
            x[:, :, i].addcmul_(a[:, :, i], x[:, :, i - 1])
        carried = torch.empty_like(reach[:, :, 0])
        state = initial
        for j in range(carried.shape[1]):
            carried[:, j] = state
            state = torch.addcmul(x[:, j, -1], reach[:, j, -1], state)
        x.addcmul_(reach, carried[:, :, None])
        initial = state
    for t in range(whole, length):
        initial = h[:, t].addcmul_(decay[:, t], initial)
    return h


@torch.library.custom_op("femixer::linear_recurrence", mutates_args=())
def _recurrence(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
    if compiled(inputs):
        h = torch.empty_like(inputs)
        native("recurrence").forward(*map(array, (decay, inputs, initial, h)))
        return h
    return _sweep(decay, inputs.clone(), initial)


@_recurrence.register_fake
def _(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
    return torch.empty_like(inputs)


@torch.library.custom_op("femixer::linear_recurrence_backward", mutates_args=())
def _recurrence_backward(grad: Tensor, decay: Tensor, h: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same recurrence backwards: e_t = grad_t + decay_{t+1} e_{t+1}; d input = e, d decay_t = e_t h_{t-1}."""
    if h.shape[1] == 0:
        return torch.zeros_like(decay), torch.zeros_like(h), torch.zeros_like(initial)
    if compiled(h):
        results = torch.empty_like(decay), torch.empty_like(h), torch.empty_like(initial)
        native("recurrence").backward(*map(array, (grad, decay, h, initial, *results)))
        return results
    later = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], 1).flip(1)
    error = _sweep(later, grad.flip(1), torch.zeros_like(initial)).flip(1)
    before = torch.cat([initial[:, None], h[:, :-1]], 1)
    return error * before, error, error[:, 0] * decay[:, 0]


@_recurrence_backward.register_fake
def _(grad: Tensor, decay: Tensor, h: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(decay), torch.empty_like(h), torch.empty_like(initial)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    decay, _, initial = inputs
    ctx.save_for_backward(decay, output, initial)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _recurrence_backward(grad.contiguous(), *ctx.saved_tensors)


_recurrence.register_autograd(_backward, setup_context=_setup)
