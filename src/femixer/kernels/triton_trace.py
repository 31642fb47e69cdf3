"""What a computation asks of a GPU, in the order in which it asks: torch's operations and our launches, with the bytes
they move and the work they do. On tensors without data (device="meta") this needs no GPU, and a question to the device
(`.item()`, `bool(x)`) is an error there, so what can be traced never waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from femixer.kernels.triton_launch import Launch, recorded

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
            work = launch.bytes, launch.flops, launch.exponentials, launch.products
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
