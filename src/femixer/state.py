"""Streaming state: what a mixer needs of the past to go on. A state is a value: going on twice from one is correct."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from femixer.layout import Past

SPARE = 256


@dataclass(frozen=True)
class State:
    """State of a mixer after the tokens it has seen."""

    owner: int
    batch: int
    device: torch.device
    past: Past
    prior: Any
    conditioner: Tensor | None

    @classmethod
    def start(cls, owner: int, x: Tensor) -> State:
        """Before the first token of x [B, T, dim]."""
        return cls(owner, x.shape[0], x.device, Past(), None, None)

    def next(self, past: Past, prior: Any, conditioner: Tensor | None) -> State:
        return State(self.owner, self.batch, self.device, past, prior, conditioner)

    def rows(self, index: Tensor) -> State:
        """The state of the sequences index [n] of the batch: reordered, repeated or left out."""

        def chosen(part: Any) -> Any:
            if isinstance(part, Tensor):
                # What all sequences share, e.g. positions, has one row.
                return part.index_select(0, index) if part.shape[0] == self.batch else part
            if isinstance(part, Growing):
                return part.rows(index)
            if isinstance(part, tuple):
                return type(part)(*map(chosen, part))
            return part

        past, prior, conditioner = (chosen(part) for part in (self.past, self.prior, self.conditioner))
        return replace(self, batch=len(index), past=past, prior=prior, conditioner=conditioner)


def usable(memory: Any) -> Any:
    """Autograd keeps no tensor that was made in inference mode: copies of those."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return memory
    if isinstance(memory, Tensor):
        return memory.clone() if memory.is_inference() else memory
    if isinstance(memory, tuple):
        return type(memory)(*map(usable, memory))
    return memory


_claims = threading.Lock()


class _Storage:
    """A buffer with room at its end, and how much of it is written."""

    def __init__(self, data: Tensor, filled: int) -> None:
        self.data, self.filled = data, filled

    def claim(self, start: int, stop: int) -> bool:
        """Take the entries from start to stop, unless someone has continued from there before."""
        with _claims:  # threads may continue one prefix
            free = self.filled == start
            if free:
                self.filled = stop
        return free


class Growing:
    """A tensor that grows along dim 2, [B, G, length, W], as a value: append returns a new one.

    Several values share one preallocated buffer as long as each continues the longest of them; another continuation of
    the same past gets a copy. With gradients, and under compilers, nothing is written in place: a graph that does not
    ask how much of a buffer is taken serves every length.
    """

    def __init__(self, storage: _Storage, length: int) -> None:
        self._storage, self.length = storage, length

    @classmethod
    def of(cls, x: Tensor) -> Growing:
        return cls(_Storage(x, x.shape[2]), x.shape[2])

    @property
    def tensor(self) -> Tensor:
        data = self._storage.data
        return data if self.length == data.shape[2] else data[:, :, : self.length]

    def alone(self) -> Tensor:
        """The tensor without room behind it from now on: the same object each time, for those who keep notes on it."""
        if self.length != self._storage.data.shape[2]:
            self._storage = _Storage(self.tensor, self.length)
        return self._storage.data

    @property
    def buffer(self) -> Tensor:
        """The same with the room behind it, contiguous."""
        return self._storage.data

    def append(self, x: Tensor) -> Growing:
        recorded = torch.is_grad_enabled() and (x.requires_grad or self._storage.data.requires_grad)
        if recorded or torch.compiler.is_compiling():
            return Growing.of(torch.cat([self.tensor, x], 2))
        longer = self.longer(x.shape[2])
        longer.buffer[:, :, self.length : longer.length] = x
        return longer

    def longer(self, count: int) -> Growing:
        """The same with `count` more entries, which the caller must write; without gradients and compilers."""
        storage, length = self._storage, self.length + count
        data = storage.data
        alien = data.requires_grad or (data.is_inference() and not torch.is_inference_mode_enabled())
        if alien or length > data.shape[2] or not storage.claim(self.length, length):
            room = length if length <= data.shape[2] else max(length + SPARE, 2 * self.length)
            buffer = data.new_empty(*data.shape[:2], room, data.shape[3])
            buffer[:, :, : self.length] = self.tensor
            storage = _Storage(buffer, length)
        return Growing(storage, length)

    def rows(self, index: Tensor) -> Growing:
        """The sequences index [n] of the batch as a value of their own, with the room that this one has."""
        return Growing(_Storage(self._storage.data.index_select(0, index), self.length), self.length)

    def take(self, index: Tensor) -> Growing:
        """The entries index [B, n] as a value of their own."""
        whole = self.tensor
        return Growing.of(whole.gather(2, index[:, None, :, None].expand(-1, whole.shape[1], -1, whole.shape[3])))
