"""The memory of tensors as numpy arrays, which compiled kernels read and write."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of a tensor's memory, without `Tensor.numpy`: that marks its storage as not resizable for good, and a parameter's
# storage belongs to whoever shards or offloads it.
_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int8: np.dtype(np.int8),
    torch.int64: np.dtype(np.int64),
    torch.bool: np.dtype(np.bool_),
}
_EMPTY = {kind: np.empty(0, dtype=kind) for kind in _TYPES.values()}
# Memory from an address on, of any length: an array says how much of it is its own.
_Memory: Any = ctypes.c_char * (1 << 46)
NOTHING = np.empty(0, dtype=np.float32)


def array(x: Tensor) -> Any:
    """x as an array of the same shape and memory."""
    kind, place = _TYPES[x.dtype], x.data_ptr()
    if not place:
        if x.numel():
            raise ValueError(f"a tensor of shape {tuple(x.shape)} on {x.device} has no data that a kernel could read")
        return _EMPTY[kind].reshape(x.shape)
    memory = _Memory.from_address(place)
    memory.owner = x  # the array keeps its tensor alive, which may be a copy made for the call
    if x.is_contiguous():
        return np.ndarray(x.shape, kind, memory)
    return np.ndarray(x.shape, kind, memory, 0, [step * kind.itemsize for step in x.stride()])


def rows(x: Tensor) -> Any:
    """The array [n, width] of a tensor [..., width]; writing to it writes to the tensor if that is contiguous."""
    return array(x.contiguous().view(-1, x.shape[-1]))


def strided(*tensors: Tensor | None) -> list[Any]:
    """Tensors [B, T, heads, channels] as kernels read them where they are not contiguous: the memory of each from its
    first element on, empty for None, and the strides [tensors, 3] of all. The channels lie side by side."""
    flat: list[Any] = []
    strides: list[tuple[int, ...]] = []
    for x in tensors:
        if x is None:
            flat.append(NOTHING)
            strides.append((0, 0, 0))
            continue
        steps, (batch, length, heads, width) = x.stride(), x.shape
        if steps[3] != 1 and width != 1:
            x = x.contiguous()
            steps = x.stride()
        strides.append(steps[:3])
        extent = (batch - 1) * steps[0] + (length - 1) * steps[1] + (heads - 1) * steps[2] + width if x.numel() else 0
        flat.append(array(x.as_strided((extent,), (1,))))
    return [*flat, np.array(strides, dtype=np.int64)]
