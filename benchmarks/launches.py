"""What a layer asks of a device in plain torch: `python benchmarks/launches.py [-v] [priors]`, on tensors without data.

Columns: torch operations of the forward and of the backward pass (views not counted, operators counted inside), those
of decoding one token, megabytes kept for the backward pass and held at the peak of a training step, beyond parameters
and input. Causal layers with all parts at B 1, T 4096, dim 512, 8 heads. With -v also the operations of every line,
file by file: how many in the forward and in the backward pass, and which.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS, parse_prior

DIM, HEADS, LENGTH = 512, 8, 4096
ATTENTION = "attention"
KINDS = (ATTENTION, *PRIORS, "gla:decay=channel", "mamba:normalize=false")


class Cost(NamedTuple):
    forward: int
    backward: int
    token: int
    saved: int
    peak: int


def layer(kind: str, causal: bool = True) -> nn.Module:
    """The layer of a prior, with options as in gla:decay=channel; attention: the softmax prior without parts."""
    name, options = ("softmax", {}) if kind == ATTENTION else parse_prior(kind)
    parts = "" if kind == ATTENTION else "CLTG"
    return FreeEnergyMixer(DIM, HEADS, name, parts, causal, prior_options=options, device="meta")


def measure(kind: str, length: int = LENGTH) -> Cost:
    mixer = layer(kind)
    x = torch.empty(1, length, DIM, device="meta", requires_grad=True)
    places: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        places[storage._cdata] = storage  # held, so that its place is not taken by another one
        return tensor

    with Memory([x, *mixer.parameters()]) as memory:
        with Operations() as forward, saved_tensors_hooks(pack, lambda tensor: tensor):
            y = mixer(x)
        for tensor in (x, y, *mixer.parameters()):
            places.pop(tensor.untyped_storage()._cdata, None)
        saved = sum(storage.nbytes() for storage in places.values())
        places.clear()
        gradient = torch.empty_like(y)
        with Operations() as backward:
            y.backward(gradient)
    return Cost(forward.count, backward.count, decode(mixer), saved, memory.peak)


def decode(mixer: nn.Module) -> int:
    """Operations of one token after some others."""
    with torch.no_grad():
        x = torch.empty(1, 7, DIM, device="meta")
        _, state = mixer(x, return_state=True)
        _, state = mixer(x[:, :1], state=state, return_state=True)  # a cache that grows does so now
        with Operations() as token:
            mixer(x[:, :1], state=state, return_state=True)
    return token.count


class Operations(TorchDispatchMode):
    """Counts operations of torch that make tensors and are no views; `lines` has them by the line that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: list[str] = []
        self.lines: dict[str, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_view(func) and any(isinstance(x, Tensor) for x in tree_leaves(result)):
            self.count += 1
            self.names.append(str(func))
            self.lines[_line()].append(str(func).split(".")[1])
        return result


def _line() -> str:
    """The innermost line of the package that is running; autograd's own operations have none."""
    frame: Any = sys._getframe()
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/src/femixer/")
        if found:
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"


def listing(kind: str) -> Iterator[str]:
    """The operations of a layer by the lines that ask for them."""
    mixer, x = layer(kind), torch.empty(1, LENGTH, DIM, device="meta", requires_grad=True)
    with Operations() as forward:
        y = mixer(x)
    gradient = torch.empty_like(y)
    with Operations() as backward:
        y.backward(gradient)
    yield f"{kind}: {forward.count} + {backward.count}"
    for line in sorted({*forward.lines, *backward.lines}):
        there, back = forward.lines.get(line, []), backward.lines.get(line, [])
        yield f"{len(there):>6}{len(back):>5}  {line:<60} {' '.join(dict.fromkeys(there + back))}"


def _is_view(func: Any) -> bool:
    shared = [result.alias_info for result in func._schema.returns]
    return func is torch.ops.aten._unsafe_view.default or any(a is not None and not a.is_write for a in shared)


class Memory(TorchDispatchMode):
    """The most bytes of storages alive at one time, of those that operations inside have made."""

    def __init__(self, old: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in old}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._watch(result.untyped_storage())
        return results

    def _watch(self, storage: Any) -> None:
        key = id(storage)
        if key in self._known or key in self._watched:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            del self._watched[key]
            self.live -= size

        self._watched[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def rows(kinds: list[str], cost: Callable[[str], Cost] = measure) -> Iterator[str]:
    rival = cost(ATTENTION)
    yield f"{'':<24}{'forward':>9}{'backward':>9}{'token':>7}{'kept MB':>9}{'ratio':>7}{'peak MB':>9}{'ratio':>7}"
    for kind in kinds:
        try:
            c = cost(kind)
        except Exception as error:
            yield f"{kind:<24}{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            continue
        kept = f"{c.saved / 1e6:>9.1f}{c.saved / rival.saved:>7.2f}"
        peak = f"{c.peak / 1e6:>9.1f}{c.peak / rival.peak:>7.2f}"
        yield f"{kind:<24}{c.forward:>9}{c.backward:>9}{c.token:>7}{kept}{peak}"


if __name__ == "__main__":
    asked = [kind for kind in sys.argv[1:] if kind != "-v"] or list(KINDS)
    for row in rows(asked):
        print(row, flush=True)
    if "-v" in sys.argv:
        for row in (row for kind in asked for row in listing(kind)):
            print(row)
