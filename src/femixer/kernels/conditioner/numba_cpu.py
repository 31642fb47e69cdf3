"""The conditioner's features as one compiled kernel each way: on so few channels, operations are mostly calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.arrays import array
from femixer.kernels.conditioner import numba_loops as loops
from femixer.kernels.marks import no_marks

READS_RESULTS = slice(-1, None)


def refuse(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> str | None:
    if y.dtype != torch.float32 or (initial is not None and initial.dtype != torch.float32):
        return f"it takes float32, not y of {y.dtype}" + ("" if initial is None else f" and a state of {initial.dtype}")
    return None if y.numel() else "y is empty"


def forward(y: Tensor, marks: Tensor | None, initial: Tensor | None, causal: bool, eps: float) -> tuple[Tensor, ...]:
    y, (batch, length, width) = y.contiguous(), y.shape
    channels = width // 3
    features, last = y.new_empty(batch, length, channels), y.new_empty(batch, channels)
    sums = y.new_empty(batch, length, channels if causal else 2 * channels, dtype=torch.float64)
    loops.forward(array(y), *_given(y, marks, initial), eps, *map(array, (sums, features, last)))
    return features, last, sums


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    y, marks, initial, _, eps = arguments
    (sums,), y = results, y.contiguous()
    shape = (*y.shape[:2], y.shape[2] // 3)
    to_features = y.new_zeros(shape) if grads[0] is None else grads[0].contiguous()
    to_last = y.new_zeros(shape[0], shape[2]) if grads[1] is None else grads[1].contiguous()
    to_y, to_initial = torch.empty_like(y), torch.empty_like(to_last)
    given = (*map(array, (to_features, to_last, y)), *_given(y, marks, initial), eps)
    loops.backward(*given, *map(array, (sums.contiguous(), to_y, to_initial)))
    return to_y, None, to_initial


def _given(y: Tensor, marks: Tensor | None, initial: Tensor | None) -> tuple[Any, Any]:
    if initial is None:
        initial = y.new_zeros(y.shape[0], y.shape[2] // 3)
    return array(no_marks() if marks is None else marks.contiguous()), array(initial.contiguous())
