"""Compiled kernels: how a loop is compiled and kept on disk, and how it is called with tensors.

A kernel is a loop over independent tasks. Called with tensors it reads and writes their memory; they are contiguous or
copied, so that what it writes to must be contiguous: made by `new_empty`, never by `empty_like`.

numba keeps a compiled function on disk as long as the function's own file is unchanged, but the machine code holds what
it calls from other files too. Here every function carries a stamp over the contents of all sources of compiled code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache
from torch import Tensor

_PACKAGE = Path(__file__).parent.parent
# Compiled loops, and what they import constants from: both end up in machine code.
_SOURCES = (
    "**/numba_*.py",
    "kernels/marks.py",
    "kernels/streams/__init__.py",
    "baselines/kernels/selective_scan/__init__.py",
)


def _stamp() -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)}):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


STAMP = _stamp()
_announced = False


class _Cache(FunctionCache):
    """numba's cache of one function, with our stamp; a function that is not there is about to be compiled."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        if Path(function.__code__.co_filename).is_relative_to(_PACKAGE):
            self._cache_file._source_stamp = STAMP
        else:  # an operator of somebody else, whose own file counts as well
            self._cache_file._source_stamp = (self._cache_file._source_stamp, STAMP)

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = super().load_overload(signature, context)
        if found is None:
            _announce()
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk must not stop a computation
            super().save_overload(signature, data)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with these options, and the result kept on disk where there is a place for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True, **options)(function)
        with suppress(RuntimeError):  # no folder can be written: compile in every process
            dispatcher._cache = _Cache(function)
        return dispatcher

    return decorate


def _announce() -> None:
    """Once in a process, before the first function is compiled: until they are on disk this takes a while."""
    global _announced
    if not _announced:
        _announced = True
        print(
            "femixer: compiling kernels once, about half a minute; `femixer doctor --warm` does it ahead",
            file=sys.stderr,
            flush=True,
        )


def silence() -> None:
    """Say nothing about compiling: the caller does."""
    global _announced
    _announced = True


# OpenMP where numba offers it: it may be entered by several threads of Python. Without it the kernels run on one
# thread, because numba's own pool may not.
_parallel = True


def _load_openmp() -> bool:
    """numba's own runtime beside torch's; its idle threads sleep, so that they do not take the cores from torch's."""
    waiting = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = waiting or "PASSIVE"
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    finally:
        if waiting is None:
            del os.environ["OMP_WAIT_POLICY"]
    setattr(numba.config, "THREADING_LAYER", "omp")  # noqa: B010
    return True


if "NUMBA_THREADING_LAYER" not in os.environ:
    _parallel = _load_openmp()

MOST_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

# No infinities are assumed away (gates and logarithms of empty sums use them), and nothing is reordered (rounding is).
MATH = {"contract", "nsz"}
# Inlined by LLVM: a call inside a loop would keep it from being vectorised.
inline = numba.njit(fastmath=MATH, error_model="numpy", forceinline=True)
# The same for sums, which are vectorised only where their order is free.
summing = numba.njit(fastmath={*MATH, "reassoc"}, error_model="numpy", forceinline=True)
# A function of its own, kept on disk.
job = compiled(fastmath=MATH, error_model="numpy")
# The same, with sums in any order.
summing_job = compiled(fastmath={*MATH, "reassoc"}, error_model="numpy")
# An index that is a sum of these is never negative, which lets its loop be vectorised.
u64 = np.uint64


# Arrays below this size are not worth waking other threads for.
SMALL = 30_000

# Both compilations of every kernel, for one thread and for several.
KERNELS: list[tuple[Any, Any]] = []


def kernel(function: Callable[..., None], small: int = SMALL) -> Callable[..., None]:
    """Compile a loop over independent tasks (`prange`), to be run on as many threads as torch uses if one of its arrays
    has `small` numbers.

    The work itself is a function of its own, compiled with `job`: numba's analysis of parallel loops is slow, and made
    for loops that are short.
    """
    serial = compiled()(function)
    # numba's cache tells two compilations of one function apart by its name only.
    twin = FunctionType(function.__code__, function.__globals__, function.__name__)
    twin.__qualname__ = f"{function.__qualname__}_parallel"
    parallel = compiled(parallel=True)(twin)
    KERNELS.append((serial, parallel))

    @functools.wraps(function)
    def run(*args: Any) -> None:
        # Calls cost as much as many a kernel, so that no more of them are made here than must be.
        operands, large = [], False
        for x in args:
            if type(x) in _TENSORS:
                x = x if x.is_contiguous() else x.contiguous()
                large = large or x.numel() >= small
                place = x.data_ptr()
                if place:
                    memory = _Memory.from_address(place)
                    memory.owner = x  # which may be a copy
                    x = np.ndarray(tuple(x.shape), _TYPES[x.dtype], memory)
                else:
                    x = _without_memory(x)
            else:
                large = large or getattr(x, "size", 0) >= small
            operands.append(x)
        threads = min(torch.get_num_threads(), MOST_THREADS) if large and _parallel else 1
        if threads == 1:
            serial(*operands)
            return
        before = numba.get_num_threads()
        if before == threads:
            parallel(*operands)
            return
        numba.set_num_threads(threads)
        try:
            parallel(*operands)
        finally:
            numba.set_num_threads(before)

    return run


# For kernels that do much with every number.
busy_kernel = functools.partial(kernel, small=SMALL // 4)

_TENSORS = (Tensor, torch.nn.Parameter)
# Of a tensor's memory, without `Tensor.numpy`: that marks its storage as not resizable for good, and a parameter's
# storage belongs to whoever shards or offloads it.
_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int8: np.dtype(np.int8),
    torch.int64: np.dtype(np.int64),
    torch.bool: np.dtype(np.bool_),
}
# Memory from an address on, of any length: an array says how much of it is its own.
_Memory: Any = ctypes.c_char * (1 << 46)
_NOTHING = np.empty(0, dtype=np.float32)


def _without_memory(x: Tensor) -> Any:
    if x.numel():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} on {x.device} has no data that a kernel could read")
    return np.empty(tuple(x.shape), _TYPES[x.dtype])


def array(x: Tensor) -> Any:
    """x as an array of the same shape and memory, contiguous or not: for what is not a kernel's argument by itself."""
    kind, place = _TYPES[x.dtype], x.data_ptr()
    if not place:
        return _without_memory(x)
    memory = _Memory.from_address(place)
    memory.owner = x
    if x.is_contiguous():
        return np.ndarray(tuple(x.shape), kind, memory)
    return np.ndarray(tuple(x.shape), kind, memory, 0, [step * kind.itemsize for step in x.stride()])


def rows(*tensors: Tensor) -> list[Any]:
    """Arrays [n, width] of tensors [..., width]; writing to one writes to its tensor if that is contiguous."""
    return [array(x.contiguous()).reshape(-1, x.shape[-1]) for x in tensors]


def strided(*tensors: Tensor | None) -> list[Any]:
    """Tensors [B, T, heads, channels] as kernels read them where they are not contiguous: the memory of each from its
    first element on, empty for None, and the strides [tensors, 3] of all. The channels lie side by side."""
    flat: list[Any] = []
    strides: list[tuple[int, ...]] = []
    for x in tensors:
        if x is None:
            flat.append(_NOTHING)
            strides.append((0, 0, 0))
            continue
        steps, (batch, length, heads, width) = x.stride(), x.shape
        if steps[3] != 1 and width != 1:
            x = x.contiguous()
            steps = x.stride()
        strides.append(steps[:3])
        extent = (batch - 1) * steps[0] + (length - 1) * steps[1] + (heads - 1) * steps[2] + width if x.numel() else 0
        memory = _Memory.from_address(x.data_ptr())
        memory.owner = x
        flat.append(np.ndarray((extent,), _TYPES[x.dtype], memory) if extent else np.empty(0, _TYPES[x.dtype]))
    return [*flat, np.array(strides, dtype=np.int64)]
