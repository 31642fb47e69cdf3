"""Which weights made a state: a number within a process, a hash of settings and weights in a file."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_numbers = itertools.count()
_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()

# How a module is used, and not what it computes from a state.
_USES = ("training", "gradient_checkpointing")


def new_number(owner: nn.Module) -> int:
    """By which the states of a module are known in this process."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def owner_of(number: int) -> nn.Module | None:
    """The module with this number, None if it is gone."""
    return _owners.get(number)


def fingerprint(owner: nn.Module) -> str:
    """What a module is, in words, and a hash of its parts' settings and of its weights: names, shapes and values.

    It reads all weights: for saving and loading, not for a step.
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
    """Raise a ValueError unless a module like this one made what was saved with this fingerprint."""
    if print_ == fingerprint(owner):
        return
    made, here = print_.rpartition(" ")[0], described(owner)
    other = f"by {made}, and this is {here}" if made != here else "with other weights or settings"
    raise ValueError(f"{name} was saved {other}; allowed is one that the same weights made")


def _settings(owner: nn.Module) -> Iterator[str]:
    """Class and plain attributes of our modules; dropout is not used where states are."""
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
