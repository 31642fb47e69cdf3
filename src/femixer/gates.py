"""Temperature and gates of the read: o = g * ((1 - lam) mu + lam F), lam = sigmoid(a), g = softplus(b) / rms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.function import run
from femixer.kernels.gating import GatedRead, fused

EPS = 1e-6
# softplus underflows to zero for a parameter far below zero, and a temperature is divided by.
LEAST_BETA = 1e-6


def inverse_temperature(parameter: Tensor) -> Tensor:
    """beta_max = softplus(parameter + 1.8), positive; 1.95 where the parameter starts, at zero."""
    return F.softplus(parameter + 1.8).clamp_min(LEAST_BETA)


def temperature_gate(logits: Tensor) -> Tensor:
    """lam = sigmoid(logits) in [0, 1]."""
    return torch.sigmoid(logits)


def outer_gate(logits: Tensor) -> Tensor:
    """g = softplus(logits) / rms over the last dim (the channels of a head), positive."""
    positive = F.softplus(logits)
    return positive * _inverse_rms(positive)


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + EPS)


def gated_read(mean: Tensor, free: Tensor | None, lam_logits: Tensor | None, gate_logits: Tensor | None) -> Tensor:
    """Each [B, T, H, D]. Without `free` the read is the mean; without lam_logits it is the free energy."""
    lam, gate = (None if x is None else x.to(mean.dtype) for x in (lam_logits, gate_logits))
    if (lam is not None or gate is not None) and fused(mean):
        start, end = (mean, free) if lam is not None or free is None else (free, None)
        return run(GatedRead, start, end, lam, gate, EPS)
    read = mean
    if free is not None:
        read = free
        if lam is not None:
            read = run(Interpolate, mean, free, lam)
    if gate is not None:
        read = run(Scale, read, gate)
    return read


class Interpolate(torch.autograd.Function):
    """(1 - lam) mu + lam F with lam = sigmoid(logits), keeping nothing but its arguments."""

    @staticmethod
    def forward(mean: Tensor, free: Tensor, logits: Tensor) -> Tensor:
        return torch.lerp(mean, free, temperature_gate(logits))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, free, logits = ctx.saved_tensors
        lam = temperature_gate(logits)
        to_free = grad * lam
        to_mean = grad - to_free
        return to_mean, to_free, (free - mean) * (to_mean * lam)


class Scale(torch.autograd.Function):
    """read * g with g = softplus(logits) / rms, keeping nothing but its arguments."""

    @staticmethod
    def forward(read: Tensor, logits: Tensor) -> Tensor:
        return outer_gate(logits).mul_(read)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        read, logits = ctx.saved_tensors
        positive = F.softplus(logits)
        inverse = _inverse_rms(positive)
        g = positive * inverse
        to_gate = grad * read
        # d g / d positive = inverse (1 - g gᵀ / D): the norm takes out what points along g.
        along = (to_gate * g).mean(-1, keepdim=True)
        to_positive = torch.addcmul(to_gate, g, along, value=-1).mul_(inverse)
        return grad * g, to_positive.mul_(torch.sigmoid(logits))
