"""The norm of the models: x / rms(x) * weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from femixer.kernels.backend import array, eager_kernels, native, rows
from femixer.kernels.function import run

# Rows whose gradients of the weight are summed by one task.
ROWS = 512


class RMSNorm(nn.RMSNorm):
    """torch's; on a CPU one compiled kernel each way, where torch makes a dozen passes over the memory."""

    def forward(self, x: Tensor) -> Tensor:
        if self.eps is None or self.weight.dtype != x.dtype or not eager_kernels(x):
            return super().forward(x)
        return run(Norm, x, self.weight, self.eps)


class Norm(torch.autograd.Function):
    """x [..., width] / sqrt(mean(x^2) + eps) * weight, keeping nothing but its arguments."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        native("norm").forward(rows(x), array(weight), eps, rows(out))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        given = rows(x)
        to_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        to_weight = x.new_empty(-(-given.shape[0] // ROWS), x.shape[-1])
        native("norm").backward(rows(grad), given, array(weight), ctx.eps, rows(to_x), array(to_weight))
        return to_x, to_weight.sum(0), None
