"""Weights of a divided model as one process has them, and back: projections whose columns are apart are put together.

`prior_proj.linear.weight` of one process is `prior_proj.q.weight`, `prior_proj.k.weight`, ... where heads are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from femixer.parallel.heads import WHOLE_NAMES, CutProjection
from femixer.parallel.local import fill, whole
from femixer.projection import Projection


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights as one process has them, by their usual names, on every rank; all ranks must call it."""
    named = model.state_dict(keep_vars=True)
    wholes = {id(x): whole(x) for x in {id(x): x for x in named.values()}.values()}  # tied ones stay one
    return joined(model, {name: wholes[id(x)] for name, x in named.items()})


def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fill a model, on however many ranks, with weights of `full_state_dict` or of the model in one process."""
    state = fitting(model, state)
    for name, target in model.state_dict(keep_vars=True).items():
        if name not in state:
            raise ValueError(f"state has no {name!r}, which the model needs")
        fill(target, state[name])


def is_named_otherwise(model: nn.Module, names: Iterable[str]) -> bool:
    """Whether weights of these names are those of the model with its heads divided, or not divided, unlike here."""
    held = {name.rpartition(":")[0] or name for name in names}
    return any(
        (apart[0] if isinstance(module, Projection) else together) in held
        for module, together, apart in _projections(model)
    )


def fitting(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights, or an optimizer's entries `name:key`, by the names that they have in the model here."""
    state = joined(model, state)
    for module, together, apart in _projections(model):
        if isinstance(module, CutProjection):
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


def _projections(model: nn.Module) -> Iterator[tuple[nn.Module, str, list[str]]]:
    """Each kind of parameter of each projection: the module, its name as one and those of its pieces."""
    for prefix, module in model.named_modules():
        if isinstance(module, (Projection, CutProjection)):
            dot = f"{prefix}." if prefix else ""
            for kind, name in WHOLE_NAMES.items():
                yield module, dot + name, [f"{dot}{column}.{kind}" for column in module.columns]
