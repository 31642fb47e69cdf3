"""Parameters that are cut over the ranks of a mesh, or copied to all: DTensors at rest, plain tensors in use.

As DTensors they have one size on any number of ranks: optimizers, clipping, FSDP2 and checkpoints of torch know what is
whose. Layers compute with this rank's part and say themselves what ranks must add up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from femixer.parallel.exchange import shared
from femixer.pieces import fitting, joined


def swapped(module: nn.Module, methods: type) -> Any:
    """The module, from now on with these methods in front of its own. Modules keep their parameters and names."""
    kind: Any = type(module)
    module.__class__ = _joined(methods, kind)
    return module


@cache
def _joined(methods: Any, kind: Any) -> Any:
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


# The dimension of a parameter that is cut, None: every rank has it all.
Dimension = int | None


class OwnPart(nn.Module):
    """Its parameters are this rank's parts while `forward` runs. The gradients of `shared_parameters`, from which every
    rank computes something else, are added up."""

    shared_parameters: tuple[str, ...] = ()

    def forward(self, *given: Any, **options: Any) -> Any:
        whole: dict[str, Any] = {name: p for name, p in self._parameters.items() if isinstance(p, DTensor)}
        try:
            own = {name: p.to_local() for name, p in whole.items()}
            for name in own.keys() & {*self.shared_parameters}:
                own[name] = shared(own[name], whole[name].device_mesh.get_group())
            self._parameters.update(own)
            return super().forward(*given, **options)
        finally:
            self._parameters.update(whole)


def distributed_parameter(parameter: Tensor, mesh: DeviceMesh, dimension: Dimension) -> nn.Parameter:
    """All ranks hold the whole parameter already: none has to be told its part."""
    placement = Replicate() if dimension is None else Shard(dimension)
    part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def divide(
    module: nn.Module, mesh: DeviceMesh, dimension: Callable[[str], Dimension], known: dict[int, nn.Parameter]
) -> None:
    """Turn the module's own parameters into DTensors, cut along dimension(name). known: those that were turned before,
    by their id, so that tied ones stay one."""
    own = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
    for name, parameter in own.items():
        if id(parameter) not in known:
            known[id(parameter)] = distributed_parameter(parameter, mesh, dimension(name))
        module._parameters[name] = known[id(parameter)]
    if own:
        swapped(module, OwnPart)


def whole(x: Tensor) -> Tensor:
    """A parameter as one rank would have it; every rank takes part."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def fill(target: Tensor, value: Tensor) -> None:
    """Copy a whole value to a parameter, of which each rank takes its part."""
    if target.shape != value.shape:
        raise ValueError(f"a value of shape {tuple(value.shape)} does not fit a parameter of {tuple(target.shape)}")
    value = value.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


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
