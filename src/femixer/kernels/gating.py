"""The gates of the read in one pass over memory: g * ((1 - lam) mu + lam F), from the gates' logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femixer.kernels.backend import compiled, native


def fused(mean: Tensor) -> bool:
    """Whether the compiled kernels serve tensors like this one; a compiler fuses the gates by itself."""
    return mean.dtype == torch.float32 and not torch.compiler.is_compiling() and compiled(mean)


class GatedRead(torch.autograd.Function):
    """mean, free, lam, gate [B, T, H, D] -> [B, T, H, D]. Without lam the read is the mean, or what is given for it."""

    @staticmethod
    def forward(mean: Tensor, free: Tensor | None, lam: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
        out = mean.new_empty(mean.shape)
        if out.numel():
            native("gates").forward(*_memory(mean, free, lam, gate), eps, out.numpy())
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, free, lam, gate = ctx.saved_tensors
        shape = mean.shape
        results = [mean.new_empty(shape if x is not None else (0,) * 4) for x in (mean, free, lam, gate)]
        if mean.numel():
            *memory, at = _memory(mean, free, lam, gate, grad)
            native("gates").backward(*memory, at, ctx.eps, *(x.numpy() for x in results))
        return *(None if x is None else d for x, d in zip((mean, free, lam, gate), results, strict=True)), None


def _memory(*tensors: Tensor | None) -> list[Any]:
    """Each tensor's memory from its first element on, and the strides [tensors, 3] of all."""
    flat: list[Any] = []
    strides = np.zeros((len(tensors), 3), dtype=np.int64)
    for line, x in enumerate(tensors):
        if x is None:
            flat.append(_NOTHING)
            continue
        x = x.detach()
        if x.stride(3) != 1 and x.shape[3] != 1:
            x = x.contiguous()
        strides[line] = step = x.stride()[:3]
        extent = (x.shape[0] - 1) * step[0] + (x.shape[1] - 1) * step[1] + (x.shape[2] - 1) * step[2] + x.shape[3]
        flat.append(x.as_strided((extent,), (1,)).numpy())
    return [*flat, strides]


_NOTHING = np.empty(0, dtype=np.float32)
