"""Streaming state: what a mixer keeps of the past. A state is a value: two continuations of one state are both correct.

torch.save adds a fingerprint of the mixer that made the state, a hash of its settings and weights (within a process, a
number identifies the mixer). torch.load restores it, also with weights_only=True and in another process, for a mixer
with the same settings and weights.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from femixer.layout import Past

SPARE = 256


@dataclass(frozen=True)
class State:
    """State of a mixer after its tokens so far. owner: the mixer's number, or its fingerprint if loaded."""

    owner: int | str
    batch: int
    device: torch.device
    past: Past
    prior: Any
    conditioner: Tensor | None

    def next(self, past: Past, prior: Any, conditioner: Tensor | None) -> State:
        return State(self.owner, self.batch, self.device, past, prior, conditioner)

    def rows(self, index: Tensor) -> State:
        """The state of the sequences index [n] of the batch; they may be reordered, repeated or dropped."""

        def chosen(part: Any) -> Any:
            if isinstance(part, Tensor):
                # Tensors shared by all sequences, such as positions, have one row.
                return part.index_select(0, index) if part.shape[0] == self.batch else part
            if isinstance(part, Growing):
                return part.rows(index)
            if isinstance(part, tuple):
                return type(part)(*map(chosen, part))
            return part

        past, prior, conditioner = (chosen(part) for part in (self.past, self.prior, self.conditioner))
        return replace(self, batch=len(index), past=past, prior=prior, conditioner=conditioner)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, without the spare room of growing buffers."""
        held = _tensors((self.past, self.prior, self.conditioner))
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def __copy__(self) -> State:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        parts = copy.deepcopy((self.past, self.prior, self.conditioner), memo)
        return replace(self, past=parts[0], prior=parts[1], conditioner=parts[2])

    def __reduce__(self) -> tuple[Callable[..., State], tuple[Any, ...]]:
        owner = self.owner
        if isinstance(owner, int):
            mixer = owner_of(owner)
            if mixer is None:
                raise ValueError("the mixer that made this state is gone; save a state while its mixer is there")
            owner = fingerprint(mixer)
        # Copies without graph, because some tensors are slices of larger ones.
        parts = (_compact(part) for part in (self.past, self.prior, self.conditioner))
        return _loaded, (owner, self.batch, str(self.device), *parts)


def _loaded(owner: str, batch: int, device: str, past: Past, prior: Any, conditioner: Tensor | None) -> State:
    """A state from a file, for a mixer with the fingerprint `owner`."""
    at = next((tensor.device for tensor in _tensors((past, prior, conditioner))), torch.device(device))
    if at.type != torch.device(device).type:
        raise ValueError(f"state was saved on {device}; loading it to {at} is not possible, allowed is {device}")
    return State(owner, batch, at, past, prior, conditioner)


def _compact(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(part, tuple):
        return type(part)(*map(_compact, part))
    return part


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Growing):
        yield part.tensor
    elif isinstance(part, tuple):
        for inner in part:
            yield from _tensors(inner)


def usable(memory: Any) -> Any:
    """Copy tensors made in inference mode, because autograd cannot save them."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return memory
    if isinstance(memory, Tensor):
        return memory.clone() if memory.is_inference() else memory
    if isinstance(memory, tuple):
        return type(memory)(*map(usable, memory))
    return memory


_claims = threading.Lock()


class _Storage:
    """A buffer with spare room at its end, and how many entries are written."""

    def __init__(self, data: Tensor, filled: int) -> None:
        self.data, self.filled = data, filled

    def claim(self, start: int, stop: int) -> bool:
        """Reserve the entries from start to stop; False if another continuation has taken them."""
        with _claims:  # threads may continue one prefix
            free = self.filled == start
            if free:
                self.filled = stop
        return free


class Growing:
    """A tensor that grows along dim 2, [B, G, length, W], as a value: append returns a new one.

    Values share one preallocated buffer as long as each continues the longest of them; a second continuation of the
    same past gets a copy. With gradients, and under compilers, nothing is written in place: a graph that does not
    depend on the fill of a buffer works for every length.
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
        """The tensor without spare room, the same object from now on, so that caches can be keyed by it."""
        if self.length != self._storage.data.shape[2]:
            self._storage = _Storage(self.tensor, self.length)
        return self._storage.data

    @property
    def buffer(self) -> Tensor:
        """The whole buffer with its spare room, contiguous."""
        return self._storage.data

    def append(self, x: Tensor) -> Growing:
        recorded = torch.is_grad_enabled() and (x.requires_grad or self._storage.data.requires_grad)
        if recorded or torch.compiler.is_compiling():
            return Growing.of(torch.cat([self.tensor, x], 2))
        longer = self.longer(x.shape[2])
        longer.buffer[:, :, self.length : longer.length] = x
        return longer

    def longer(self, count: int) -> Growing:
        """A value with `count` more entries, which the caller must write; only without gradients and compilers."""
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
        """The sequences index [n] of the batch as a separate value, with as much spare room."""
        return Growing(_Storage(self._storage.data.index_select(0, index), self.length), self.length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Growing:
        return Growing(copy.deepcopy(self._storage, memo), self.length)

    def __reduce__(self) -> tuple[Callable[..., Growing], tuple[Tensor]]:
        return _grown, (_compact(self.tensor),)

    def take(self, index: Tensor) -> Growing:
        """The entries index [B, n] as a separate value."""
        whole = self.tensor
        return Growing.of(whole.gather(2, index[:, None, :, None].expand(-1, whole.shape[1], -1, whole.shape[3])))


def _grown(tensor: Tensor) -> Growing:
    return Growing.of(tensor)


# Functions that torch.load(weights_only=True) may call; femixer.trees adds the tuple types of states.
torch.serialization.add_safe_globals([_loaded, _grown])

_numbers = itertools.count()
_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()

# Attributes that do not affect what a module computes from a state.
_USES = ("training", "gradient_checkpointing")


def new_number(owner: nn.Module) -> int:
    """A number that identifies the module as owner of states in this process."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def owner_of(number: int) -> nn.Module | None:
    """The module with this number, None if it no longer exists."""
    return _owners.get(number)


def fingerprint(owner: nn.Module) -> str:
    """A description of the module, and a hash of its settings and weights (names, shapes and values).

    It reads all weights, so it is for saving and loading, not for a step.
    """
    found = hashlib.sha256()
    for line in _settings(owner):
        found.update(f"{line}\n".encode())
    for name, value in owner.state_dict().items():
        if type(value) is not Tensor or value.is_meta:
            kind = "on the meta device" if getattr(value, "is_meta", False) else f"a {type(value).__name__}"
            raise ValueError(
                f"states of this {type(owner).__name__} cannot be saved or loaded: its weight {name} is {kind}; "
                "allowed are plain tensors"
            )
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"{described(owner)} {found.hexdigest()}"


def described(owner: nn.Module) -> str:
    config: Any = getattr(owner, "config", None)
    about = owner.extra_repr() if config is None else f"{config.num_hidden_layers} layers, {config.hidden_size} wide"
    return f"{type(owner).__name__}({about})"


def check_made_by(print_: str, owner: nn.Module, name: str) -> None:
    """Raise a ValueError unless `print_` is the fingerprint of this module; name: what was saved."""
    if print_ == fingerprint(owner):
        return
    made, here = print_.rpartition(" ")[0], described(owner)
    other = f"by {made}, and this is {here}" if made != here else "with other weights or settings"
    raise ValueError(f"{name} was saved {other}; allowed is one that the same weights made")


def _settings(owner: nn.Module) -> Iterator[str]:
    """Class and plain attributes of our modules. Dropout is not included: states are used without it."""
    for name, module in owner.named_modules():
        if type(module).__module__.startswith("femixer."):
            plain = {
                key: value
                for key, value in vars(module).items()
                if not key.startswith("_")
                and key not in _USES
                and (value is None or isinstance(value, (bool, int, float, str)))
            }
            yield f"{name} {type(module).__name__} {sorted(plain.items())}"
