"""The one place that decides whether a recurrence runs as a compiled kernel or in plain torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_loaded: dict[str, ModuleType] = {}
# None: numba is there, but whether it works was not tried yet.
_usable: bool | None = None if importlib.util.find_spec("numba") is not None else False


def _after_fork() -> None:
    """OpenMP, whose threads the kernels share with torch, does not survive a fork."""
    global _usable
    _usable = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def compiled(like: Tensor) -> bool:
    """Whether there are compiled kernels for tensors like this one; plain torch must do where not."""
    if _usable is False or like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return False
    # A compiler's trace only writes down that the kernels are called.
    return True if _usable or torch.compiler.is_compiling() else _try()


def one_token(x: Tensor) -> bool:
    """Whether x [B, T, width] is a step of decoding that the kernels for single tokens serve."""
    if x.dim() != 3 or x.shape[0] == 0 or x.shape[1] != 1 or x.dtype != torch.float32:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return compiled(x)


def _try() -> bool:
    """Load one kernel: a numba that does not fit its surroundings shows then, not in the middle of a read."""
    global _usable
    try:
        native("recurrence")
        _usable = True
    except Exception as error:
        warnings.warn(f"numba does not work here ({error}); kernels run in plain torch", stacklevel=2)
        _usable = False
    return _usable


def native(name: str) -> ModuleType:
    """The module `name` of compiled kernels; importing numba takes a moment, so not before they are needed."""
    # Looking a module up again takes as long as some kernels.
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = importlib.import_module(f"femixer.kernels.native.{name}")
    return module


def or_empty(marks: Tensor | None) -> Tensor:
    """Marks [B, T] of tokens as a compiled kernel wants them: empty where there are none."""
    return torch.empty(0, 0, dtype=torch.int8, device="cpu") if marks is None else marks.contiguous()


def eager_kernels(x: Tensor) -> bool:
    """Whether x is float32 on a CPU and not being traced: a compiler fuses by itself what these kernels do at once."""
    if x.dtype != torch.float32 or not x.numel() or torch.compiler.is_compiling():
        return False
    return compiled(x)


def rows(x: Tensor) -> Any:
    """The array [n, width] of a tensor [..., width]; writing to it writes to the tensor if that is contiguous."""
    return array(x.contiguous().view(-1, x.shape[-1]))


def array(x: Tensor) -> Any:
    """The numpy view of a tensor's memory that a compiled kernel reads or writes."""
    return x.detach().numpy()


def memory(*tensors: Tensor | None) -> list[Any]:
    """Tensors [B, T, heads, channels] as compiled kernels read them where they are not contiguous: the memory of each
    from its first element on, empty for None, and the strides [tensors, 3] of all. The channels lie side by side."""
    flat: list[Any] = []
    strides: list[tuple[int, ...]] = []
    for x in tensors:
        if x is None:
            flat.append(_NOTHING)
            strides.append((0, 0, 0))
            continue
        x = x.detach()
        steps, (batch, length, heads, width) = x.stride(), x.shape
        if steps[3] != 1 and width != 1:
            x = x.contiguous()
            steps = x.stride()
        strides.append(steps[:3])
        extent = (batch - 1) * steps[0] + (length - 1) * steps[1] + (heads - 1) * steps[2] + width if x.numel() else 0
        flat.append(x.as_strided((extent,), (1,)).numpy())
    return [*flat, np.array(strides, dtype=np.int64)]


_NOTHING = np.empty(0, dtype=np.float32)
