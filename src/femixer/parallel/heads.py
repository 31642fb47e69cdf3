"""Tensor parallelism: the heads of a mixer, and the width of an MLP, over the ranks of a mesh.

All ranks have the same tokens x. Each computes its heads from them and its part of the output projection; the parts are
added up (once forwards, and once for the gradient of x backwards). The conditioner, whose features all heads read, is
the same everywhere.

Parameters that are cut over the ranks, or copied to all, are DTensors at rest and plain tensors in use. As DTensors
they have one size on any number of ranks: optimizers, clipping, FSDP2 and checkpoints of torch know what is whose.
Layers compute with this rank's part and say themselves what ranks must add up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from femixer.kernels.modulation import modulation
from femixer.mixer import FreeEnergyMixer, Projected
from femixer.parallel.cut import shared, summed
from femixer.pieces import fitting, joined
from femixer.priors.softmax import SoftmaxPrior
from femixer.projection import KINDS, Projection


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


Known = dict[int, nn.Parameter]


def check_heads(mixer: FreeEnergyMixer, ranks: int) -> None:
    """Raise a ValueError unless the mixer's heads can be divided among so many ranks."""
    for name, count in (("heads", mixer.heads), ("kv_heads", mixer.kv_heads)):
        if count % ranks:
            raise ValueError(f"{name}={count} cannot be divided among {ranks} ranks of 'tp'; allowed is a multiple")
    if isinstance(mixer.prior, SoftmaxPrior) and mixer.prior.score_bias is not None:
        raise ValueError("score_bias does not fit 'tp': it scores all heads at once")


def cut_heads(mixer: FreeEnergyMixer, mesh: DeviceMesh, known: Known) -> None:
    """From now on each rank of the mesh (of one dimension) has its part of the heads."""
    ranks, group = mesh.size(), mesh.get_group()
    check_heads(mixer, ranks)
    for name, common in (("prior_proj", mixer.prior.shared_columns), ("value_proj", ())):
        projection = getattr(mixer, name)
        if projection is not None:
            setattr(mixer, name, CutProjection(projection, common, mesh))
    for part in (mixer, mixer.prior):
        part.heads, part.kv_heads = part.heads // ranks, part.kv_heads // ranks
    swapped(mixer, HeadsMixer).group = group
    # Temperatures and the parameters of priors have the heads first, but for what heads share.
    divide(mixer, mesh, lambda name: 0, known)
    divide(mixer.prior, mesh, lambda name: None if name in mixer.prior.shared_parameters else 0, known)
    cut_inputs(mixer.out_proj, mesh, known)
    if mixer.conditioner is not None:
        divide(mixer.conditioner.in_proj, mesh, lambda name: None, known)


def cut_width(mlp: Any, mesh: DeviceMesh, known: Known) -> None:
    """The width of a SwiGLU over the ranks."""
    width, ranks = mlp.gate_proj.weight.shape[0], mesh.size()
    if width % ranks:
        raise ValueError(
            f"intermediate_size={width} cannot be divided among {ranks} ranks of 'tp'; allowed is a multiple"
        )
    for linear in (mlp.gate_proj, mlp.up_proj):
        divide(linear, mesh, lambda name: 0, known)
    cut_inputs(mlp.down_proj, mesh, known)
    swapped(mlp, SharedInput).group = mesh.get_group()


def cut_inputs(linear: nn.Linear, mesh: DeviceMesh, known: Known) -> None:
    """A linear map of whose inputs each rank has some."""

    swapped(linear, SummedOutput).group = mesh.get_group()
    divide(linear, mesh, lambda name: 1 if name == "weight" else None, known)


class HeadsMixer(FreeEnergyMixer):
    group: Any

    def _columns(self, x: Tensor, features: Tensor | None, context: Tensor | None) -> Projected:
        features = None if features is None else shared(features, self.group)
        return super()._columns(shared(x, self.group), features, context)


class SharedInput(nn.Module):
    group: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(shared(x, self.group))


class SummedOutput(nn.Linear):
    group: Any

    def forward(self, x: Tensor) -> Tensor:
        y = summed(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class CutProjection(nn.Module):
    """A Projection of which each rank has the columns of its heads, and all of those that heads share.

    Columns side by side cannot be cut in one piece, so every name has parameters of its own: q.weight, q.bias,
    q.modulation, k.weight, ...
    """

    is_apart = True  # see femixer.pieces

    def __init__(self, projection: Projection, common: tuple[str, ...], mesh: DeviceMesh) -> None:
        """common: the names that heads share."""
        super().__init__()
        self.pieces, self.common = projection.pieces, common
        ranks, self.group = mesh.size(), mesh.get_group()
        self.whole_widths = projection.widths
        self.columns = {
            name: columns if name in common else columns._replace(width=columns.width // ranks)
            for name, columns in projection.columns.items()
        }
        self.scaled = sum(c.width for c in self.columns.values() if not c.additive)
        held = dict(projection.named_parameters())
        self.kinds = [kind for kind, name in KINDS.items() if name in held]
        for number, name in enumerate(self.columns):
            piece = nn.Module()
            for kind in self.kinds:
                parameter = held[KINDS[kind]]
                rows = parameter.detach().split(self.whole_widths)[number].clone()
                rows.requires_grad_(parameter.requires_grad)
                piece.register_parameter(kind, distributed_parameter(rows, mesh, None if name in common else 0))
            self.add_module(name, piece)

    @property
    def widths(self) -> list[int]:
        return [c.width for c in self.columns.values()]

    def _own(self, kind: str) -> Tensor | None:
        """This rank's columns [width, ...]; heads on other ranks read shared ones too."""
        if kind not in self.kinds:
            return None
        pieces = [getattr(self.get_submodule(name), kind) for name in self.columns]
        own = [piece.to_local() if isinstance(piece, DTensor) else piece for piece in pieces]
        named = zip(self.columns, own, strict=True)
        return torch.cat([shared(x, self.group) if name in self.common else x for name, x in named])

    def forward(self, x: Tensor, features: Tensor | None = None) -> dict[str, Tensor]:
        weight, rows = self._own("weight"), self._own("modulation")
        assert weight is not None
        projected = F.linear(x, weight, self._own("bias"))
        if rows is None or features is None:
            pieces = projected.split(self.widths, -1)
        else:
            pieces = modulation(projected, features, rows, self.scaled, self.widths)
        return dict(zip(self.columns, pieces, strict=True))
