"""Projections whose columns lie together in one parameter, or apart where heads are divided: names of the same weights.

`prior_proj.linear.weight` of one process is `prior_proj.q.weight`, `prior_proj.k.weight`, ... there. Modules of either
kind have `pieces`, from the name together to the names apart, and `is_apart`; those apart also `whole_widths`, the rows
of each piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_named_otherwise(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether weights of these names are those of the model with its heads divided, or not divided, unlike here."""
    held = {name.rpartition(":")[0] or name for name in names}
    return any((together if module.is_apart else apart[0]) in held for module, together, apart in _projections(model))


def fitting(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights, or an optimizer's entries `name:key`, by the names that they have in the model here."""
    state = joined(model, state)
    for module, together, apart in _projections(model):
        if module.is_apart:
            for key in [key for key in state if key.rpartition(":")[0] == together or key == together]:
                value, ending = state.pop(key), key.removeprefix(together)
                # A count of steps is one number, of which each has its own.
                parts = value.split(module.whole_widths) if value.dim() else [value.clone() for _ in apart]
                state |= {name + ending: part for name, part in zip(apart, parts, strict=True)}
    return state


def joined(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the columns of projections together."""
    found = dict(state)
    for _, together, apart in _projections(model):
        endings = [key.removeprefix(apart[0]) for key in state if key == apart[0] or key.startswith(f"{apart[0]}:")]
        for ending in endings:
            parts = [found.pop(name + ending) for name in apart]
            found[together + ending] = torch.cat(parts) if parts[0].dim() else parts[0]
    return found


def _projections(model: nn.Module) -> Iterator[tuple[Any, str, list[str]]]:
    """Each parameter of each projection: the module, its name together and those apart."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for together, apart in module.pieces.items() if hasattr(module, "is_apart") else ():
            yield module, dot + together, [dot + name for name in apart]
