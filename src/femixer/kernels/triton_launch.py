"""Launching Triton kernels, in one place: on a GPU they run, with TRITON_INTERPRET=1 they run on CPU tensors, and on
tensors without data (device="meta") they are only written down. `recorded()` lists launches where they happen; from
such a list kernels are compiled ahead of time. `traced()` lists torch's operations too, with the bytes they move and
the work they do: from that their cost is estimated.

Kernels are `@triton.jit` functions in the `triton_*.py` of an operator. What changes with the batch or the length is
named in `do_not_specialize`, so that nothing is compiled anew for another length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# The GPU for which tiles are chosen where tensors are on none: see `aimed_at`.
DEFAULT_TARGET = "sm_90"
# Types of the tensors that kernels read; inside they compute in float32.
HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
# CUDA's limit along all axes of a grid but the first.
MOST_PROGRAMS = 65535


class Launch(NamedTuple):
    """One launch. operands: the kernel's arguments by position; options: its constants by name, num_warps, num_stages.

    bytes: read and written, each tensor once unless the caller knows better; flops: of matrix products, in the type
    `products`; exponentials: also logarithms and the like, which a GPU computes at a lower rate; loaded: bytes that
    programs load where they load the same ones, as often as they do: from the cache that all of them share.
    """

    kernel: Any
    grid: tuple[int, ...]
    operands: tuple[Any, ...]
    options: dict[str, Any]
    bytes: int
    flops: int
    exponentials: int
    products: torch.dtype
    loaded: int

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def label(self) -> str:
        """With the operator's folder in front: "rms_norm.forward"."""
        return f"{self.kernel.fn.__module__.split('.')[-2]}.{self.name.lstrip('_')}"


_records: ContextVar[list[Launch] | None] = ContextVar("launches", default=None)
_aimed: ContextVar[str] = ContextVar("target", default=DEFAULT_TARGET)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches inside, in their order."""
    launches: list[Launch] = []
    token = _records.set(launches)
    try:
        yield launches
    finally:
        _records.reset(token)


@contextmanager
def aimed_at(target: str) -> Iterator[None]:
    """Inside, tiles are chosen for this GPU ("sm_80", "gfx942", ...) where tensors are on none."""
    token = _aimed.set(target)
    try:
        yield
    finally:
        _aimed.reset(token)


def target_of(x: Tensor) -> str:
    """The architecture for which tiles are chosen: that of the tensor's GPU, "sm_90" or "gfx942"."""
    return _architecture(x.device.index) if x.device.type == "cuda" else _aimed.get()


def exact_products(target: str) -> str:
    """`input_precision` of tl.dot where float32 must keep its digits: tensor cores three times on NVIDIA's GPUs."""
    return "tf32x3" if target.startswith("sm_") else "ieee"


def all_registers(target: str) -> dict[str, int]:
    """Options of a kernel that may have as many registers as there are: NVIDIA's assembler would have it spill some, so
    that more programs run side by side."""
    return {"maxnreg": 255} if target.startswith("sm_") else {}


@cache
def _architecture(device: int | None) -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *operands: Any,
    moved: int | None = None,
    flops: int = 0,
    exponentials: int = 0,
    loaded: int = 0,
    exact: int = False,
    **options: Any,
) -> None:
    """Run a kernel over a grid, or only write it down where its tensors have no data.

    moved: bytes that it reads and writes, if that is not every tensor once. flops, exponentials, loaded: see
    Launch. exact: matrix products are of float32 also where the first tensor has fewer digits.
    """
    if 0 in grid:
        return
    if max(grid[1:], default=0) > MOST_PROGRAMS:
        allowed = f"beside the first, axes have at most {MOST_PROGRAMS} programs"
        raise ValueError(f"grid={grid} of {kernel.__name__} is not allowed; {allowed}")
    tensors = [x for x in operands if isinstance(x, Tensor)]
    records = _records.get()
    if records is not None:
        size = size_of(*tensors) if moved is None else moved
        kind = torch.float32 if exact else tensors[0].dtype
        # Not the tensors themselves: whoever is handed one as a gradient takes it over if nobody else has it.
        noted = tuple(x.detach() if isinstance(x, Tensor) else x for x in operands)
        records.append(Launch(kernel, grid, noted, options, size, flops, exponentials, kind, loaded))
    device = tensors[0].device
    if device.type == "meta":
        return
    with _device_guard(device):
        # Named, because Triton's default for it is about to change.
        kernel[grid](*operands, enable_fp_fusion=True, **options)


def size_of(*tensors: Tensor | None) -> int:
    """Bytes of tensors, each once, for `moved`: what is missing is often stood in for by another."""
    once = {id(x): x for x in tensors if x is not None}
    return sum(x.numel() * x.element_size() for x in once.values())


def _device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


# Operations that compute one exponential, logarithm, root or the like for every number of their result.
_EXPONENTIAL = ("exp", "log", "softplus", "sigmoid", "silu", "softmax", "rsqrt", "sqrt", "tanh", "sin", "cos", "pow")


class Step(NamedTuple):
    """One launch: torch's operation or our kernel, by `kernel`. flops are those of matrix products, in this type."""

    name: str
    kernel: bool
    bytes: int
    flops: int
    exponentials: int
    dtype: torch.dtype = torch.float32
    loaded: int = 0


class _Steps(TorchDispatchMode):
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._launches, self._seen = launches, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.catch_up()
        if not _is_free(func) and any(isinstance(x, Tensor) for x in tree_leaves(result)):
            name = func._overloadpacket.__name__
            given = () if name.startswith("new_") else (args, kwargs)  # what is new is only like another tensor
            tensors = [x for x in tree_leaves((given, result)) if isinstance(x, Tensor)]
            size = sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)
            count = flop_registry.get(func._overloadpacket)
            flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
            heavy = any(part in name for part in _EXPONENTIAL)
            exponentials = max((x.numel() for x in tensors), default=0) if heavy else 0
            self.steps.append(Step(name, False, size, flops, exponentials, tensors[-1].dtype))
        return result

    def catch_up(self) -> None:
        """Our launches since the last operation of torch."""
        for launch in self._launches[self._seen :]:
            work = launch.bytes, launch.flops, launch.exponentials, launch.products, launch.loaded
            self.steps.append(Step(launch.label, True, *work))
        self._seen = len(self._launches)


def _is_free(func: Any) -> bool:
    """Views and new memory launch nothing."""
    shared = [result.alias_info for result in func._schema.returns]
    view = func is torch.ops.aten._unsafe_view.default or any(a is not None and not a.is_write for a in shared)
    return view or "empty" in func._overloadpacket.__name__


@contextmanager
def traced() -> Iterator[list[Step]]:
    """The steps inside, complete when the context ends."""
    with recorded() as launches:
        mode = _Steps(launches)
        with mode:
            yield mode.steps
        mode.catch_up()
