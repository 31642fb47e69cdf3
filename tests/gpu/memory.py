"""What a kernel does with memory, watched in Triton's interpreter, which itself reads and writes wherever it is told.

- An address must be that of a number of a tensor that the launch was given; gaps in a view are not its numbers.
- What a program writes, no other one may touch in the same launch, but for additions to the same number: programs run
  in any order.
- Between writing a place and reading it there must be a barrier, and between reading and writing it too, unless each
  number is read by the one thread that writes it: threads run in any order as well.
- Memory that nobody wrote is NaN, so what is made from it is NaN too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]

NOBODY, SEVERAL = 0, -1
# Threads of a warp, on AMD's GPUs. A tile of fewer numbers than a program has threads is held in several copies.
THREADS = 64


class Place:
    """Memory that tensors of a launch share, byte by byte."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.start, size = storage.data_ptr(), storage.nbytes()
        self.given = torch.zeros(size, dtype=torch.bool)  # whether a tensor has it
        self.inside = self.given.numpy()
        # Programs; then the last load that read a byte, and stretches between barriers in which it was written, and
        # read by threads with copies.
        self.readers, self.writers, self.loads, self.written, self.copied = np.zeros((5, size), dtype=np.int64)

    def include(self, x: torch.Tensor) -> None:
        width = x.element_size()
        sizes, steps = (*x.shape, width), (*(width * step for step in x.stride()), 1)
        self.given.as_strided(sizes, steps, x.storage_offset() * width).fill_(True)


class Watch:
    """One launch."""

    def __init__(self, name: str, tensors: list[torch.Tensor], warps: int) -> None:
        self.name, self.warps, self.program, self.stretch = name, warps, 0, 0
        self.tiles: dict[int, Array] = {}
        self.count = 0
        places: dict[int, Place] = {}
        for x in tensors:
            storage = x.untyped_storage()
            if storage.nbytes():
                places.setdefault(storage.data_ptr(), Place(storage)).include(x)
        self.places = sorted(places.values(), key=lambda place: place.start)
        self.starts = np.array([place.start for place in self.places], dtype=np.uint64)

    def begin(self) -> None:
        self.program += 1
        self.wait()

    def wait(self) -> None:
        self.stretch += 1
        self.tiles.clear()

    def found(self, verb: str, pointers: Any, mask: Any) -> Iterator[tuple[Place, Array]]:
        """Where in which memory the pointers point."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        width = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
        which = np.searchsorted(self.starts, addresses, side="right") - 1
        for i in set(which.tolist()):
            assert i >= 0, f"{self.name} {verb} in front of all its tensors"
            place = self.places[i]
            at = (addresses[which == i] - np.uint64(place.start)).astype(np.int64)
            last = at + width - 1
            inside = last < place.inside.size
            inside &= place.inside[np.where(inside, at, 0)] & place.inside[np.where(inside, last, 0)]
            assert inside.all(), f"{self.name} {verb} {np.sum(~inside)} numbers that its tensors do not have"
            yield place, at

    def agree(self, verb: str, programs: Array, *others: int) -> None:
        alone = (programs == NOBODY) | np.isin(programs, (self.program, *others))
        assert alone.all(), f"{self.name} {verb} what another program touches in the same launch"

    def load(self, pointers: Any, mask: Any) -> None:
        self.count += 1
        self.tiles[self.count] = pointers.data
        for place, at in self.found("reads", pointers, mask):
            self.agree("reads", place.writers[at])
            assert not (place.written[at] == self.stretch).any(), f"{self.name} reads what it wrote, without a barrier"
            place.readers[at] = np.where(np.isin(place.readers[at], (NOBODY, self.program)), self.program, SEVERAL)
            place.loads[at] = self.count
            if self.warps > 1 and pointers.data.size < THREADS * self.warps:
                place.copied[at] = self.stretch

    def store(self, pointers: Any, mask: Any) -> None:
        for place, at in self.found("writes", pointers, mask):
            self.agree("writes", place.writers[at])
            self.agree("writes", place.readers[at])
            for load in set(place.loads[at].tolist()) & self.tiles.keys():
                same = np.array_equal(self.tiles[load], pointers.data) and (place.copied[at] != self.stretch).all()
                assert same, f"{self.name} writes what it read, without a barrier"
            place.writers[at], place.written[at] = self.program, self.stretch

    def add(self, pointers: Any, mask: Any) -> None:
        for place, at in self.found("adds to", pointers, mask):
            self.agree("adds to", place.writers[at], SEVERAL)
            self.agree("adds to", place.readers[at])
            place.writers[at] = SEVERAL


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        x = make(*arguments, **options)
        if type(x) is torch.Tensor and x.device.type == "cpu":
            x.detach().fill_(torch.nan if x.is_floating_point() else 77)
        return x

    return made


@contextmanager
def watched() -> Iterator[list[str]]:
    """Inside, launches are watched; the names of their kernels."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    running: list[Watch] = []
    names: list[str] = []

    def launch(do: Any) -> Any:
        def launched(self: Any, *arguments: Any, **options: Any) -> Any:
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            names.append(f"{self.fn.__module__.rpartition('.')[0].rpartition('.')[2]}.{self.fn.__name__.lstrip('_')}")
            running.append(Watch(names[-1], tensors, options.get("num_warps", 4)))
            try:
                return do(self, *arguments, **options)
            finally:
                running.pop()

        return launched

    def noted(do: Any, note: Any, *which: int) -> Any:
        """do, and before it note with some of its arguments."""

        def both(self: Any, *given: Any) -> Any:
            note(running[-1], *(given[i] for i in which))
            return do(self, *given)

        return both

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__call__", launch(executor.__call__))
        patch.setattr(builder, "set_grid_idx", noted(builder.set_grid_idx, Watch.begin))
        patch.setattr(builder, "create_barrier", noted(builder.create_barrier, Watch.wait))
        patch.setattr(builder, "create_masked_load", noted(builder.create_masked_load, Watch.load, 0, 1))
        patch.setattr(builder, "create_masked_store", noted(builder.create_masked_store, Watch.store, 0, 2))
        patch.setattr(builder, "create_atomic_rmw", noted(builder.create_atomic_rmw, Watch.add, 1, 3))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield names
