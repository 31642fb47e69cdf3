"""Weights of a divided model as one process has them, and back."""

from __future__ import annotations

from torch import Tensor, nn

from femixer.parallel.local import fill, whole
from femixer.pieces import fitting, joined


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights as one process has them, by their usual names, on every rank; all ranks must call it."""
    named = model.state_dict(keep_vars=True)
    wholes = {id(x): whole(x) for x in {id(x): x for x in named.values()}.values()}  # tied ones stay one
    return joined(model, {name: wholes[id(x)] for name, x in named.items()})


def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fill a model, on however many ranks, with weights of `full_state_dict` or of the model in one process."""
    state = fitting(model, state)
    targets = model.state_dict(keep_vars=True)
    if unknown := sorted(state.keys() - targets.keys()):
        raise ValueError(f"state has {unknown[0]!r} and {len(unknown) - 1} more that the model does not have")
    for name, target in targets.items():
        if name not in state:
            raise ValueError(f"state has no {name!r}, which the model needs")
        fill(target, state[name])
