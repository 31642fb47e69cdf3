"""The gates of the read in one pass over memory: g * ((1 - lam) mu + lam F), from the gates' logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femixer.kernels.backend import compiled, memory, native


def fused(mean: Tensor) -> bool:
    """Whether the compiled kernels serve tensors like this one; a compiler fuses the gates by itself."""
    return mean.dtype == torch.float32 and not torch.compiler.is_compiling() and compiled(mean)


class GatedRead(torch.autograd.Function):
    """mean, free, lam, gate [B, T, H, D] -> [B, T, H, D]. Without lam the read is the mean, or what is given for it."""

    @staticmethod
    def forward(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
        out = mean.new_empty(mean.shape)
        if out.numel():
            native("gates").forward(*memory(mean, free, lam, gate), eps, out.numpy())
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, free, lam, gate = ctx.saved_tensors
        results = gradients_of_gates(grad, mean, free, lam, gate, ctx.eps)
        return *(None if x is None else d for x, d in zip((mean, free, lam, gate), results, strict=True)), None


def gradients_of_gates(
    grad: Tensor, mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float
) -> list[Tensor]:
    """Of mean, free, lam and gate; empty for what is not there."""
    shape = mean.shape
    results = [mean.new_empty(shape if x is not None else (0,) * 4) for x in (mean, free, lam, gate)]
    if mean.numel():
        native("gates").backward(*memory(mean, free, lam, gate, grad), eps, *(x.numpy() for x in results))
    return results
