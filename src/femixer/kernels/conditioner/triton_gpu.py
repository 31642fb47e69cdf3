"""The conditioner's features by chunks of tokens: softplus, both sums, layer norm and product in one pass each way.

For the backward only what reaches each chunk is kept; the sums inside of chunks are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.conditioner import triton_kernels as kernels
from femixer.kernels.triton_tokens import Chunks, rows, unserved

READS_RESULTS = slice(-1, None)
# The most channels that a program holds.
WIDEST = 256


def refuse(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> str | None:
    channels = y.shape[2] // 3
    if channels > WIDEST:
        return f"{channels} channels are too many, {WIDEST} are the most"
    return unserved(y, initial) if y.shape[1] else "there is no token"


def _chunks(y: Tensor) -> Chunks:
    return Chunks(y.shape[0], y.shape[1], y.shape[2] // 3)


def results(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    """The last one has, per chunk, the product of the decays and the state before it; both ways, the same of later
    tokens."""
    batch, length, channels = y.shape[0], y.shape[1], y.shape[2] // 3
    sums = _chunks(y).summaries(2 if causal else 4, y.device)
    last = y.new_empty(batch, channels, dtype=torch.float32)
    return y.new_empty(batch, length, channels), last, sums


def _given(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool) -> tuple[Any, ...]:
    """y and its step, with y for marks and state that are not there, and what is there."""
    y, step = rows(y)
    there = {"HAS_MARKS": marks is not None, "CAUSAL": causal}
    known = y if marks is None else marks.contiguous(), y if initial is None else initial.contiguous()
    return y, *known, step, there, {"HAS_INITIAL": initial is not None}


def forward(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    made = features, last, sums = results(y, marks, initial, causal, eps)
    chunks, count = _chunks(y), features.numel()
    y, marks, initial, step, there, start = _given(y, marks, initial, causal)
    if chunks.count > 1:
        chunks.walk(kernels.summarise, y, marks, sums, step, **there, whole=True, exponentials=count)
        chunks.carry(kernels.carry, sums, initial, sums, **start, CAUSAL=causal, BACK=False)
    later = sums if causal else torch.empty(features.shape, dtype=torch.float32, device=y.device)
    operands = y, marks, initial, sums, later, features, last, step, eps
    chunks.walk(kernels.features, *operands, **there, **start, whole=True, exponentials=4 * count)
    return made


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    y, marks, initial, causal, eps = arguments
    (sums,), (batch, length, width) = results, y.shape
    chunks, shape = _chunks(y), (batch, length, width // 3)
    grad = y.new_zeros(shape) if grads[0] is None else grads[0].contiguous()
    to_last = grad if grads[1] is None else grads[1].contiguous()
    to_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    to_initial = None if initial is None else torch.empty_like(initial, memory_format=torch.contiguous_format)
    work = torch.empty(2 if causal else 4, *shape, dtype=torch.float32, device=y.device)
    ends = torch.empty_like(sums)
    y, marks, before, step, there, start = _given(y, marks, initial, causal)
    operands = y, marks, before, sums, grad, to_y, work, ends, step, eps
    chunks.walk(kernels.through_features, *operands, **there, **start, whole=True, exponentials=6 * grad.numel())
    if chunks.count > 1:
        end = {"HAS_INITIAL": grads[1] is not None}
        chunks.carry(kernels.carry, ends, to_last, sums, **end, CAUSAL=causal, BACK=True)
    operands = y, marks, before, to_last, to_y, to_y if to_initial is None else to_initial, work, ends, step
    end = {"HAS_TO_LAST": grads[1] is not None}
    chunks.walk(kernels.through_sums, *operands, **there, **start, **end, whole=True, exponentials=grad.numel())
    return to_y, None, to_initial
