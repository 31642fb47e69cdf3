"""Models over several devices: sequences (cp), heads (tp) and batches (dp) divided over the ranks of a mesh, whose
dimensions say what is divided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from femixer.mixer import FreeEnergyMixer
from femixer.parallel.context import cut_mixer, has_summary
from femixer.parallel.cut import Cut, own_tokens, summed, summed_over_cut, whole_sequence
from femixer.parallel.heads import check_heads, cut_heads, cut_width, divide, full_state_dict, load_full_state_dict
from femixer.priors.softmax import SoftmaxPrior

__all__ = [
    "HeadParallel",
    "WidthParallel",
    "full_state_dict",
    "load_full_state_dict",
    "own_tokens",
    "parallelize",
    "summed_over_cut",
    "tensor_plan",
    "whole_sequence",
]


# Dimensions of the batch, from the outermost; accelerate's ParallelismConfig has the last two.
BATCH = ("dp", "dp_replicate", "dp_shard")
DIMENSIONS = (*BATCH, "cp", "tp")
# Up to so many ranks of a cut sequence, keys and values of softmax attention are gathered: one message instead of many.
FEW = 8


def parallelize(model: nn.Module, mesh: DeviceMesh, *, shard: bool = False, ring: bool | None = None) -> Any:
    """The model, from now on divided over the ranks of the mesh, by the names of its dimensions:

    dp  the batch: ranks have different sequences; gradients are averaged.
    cp  the sequence: ranks are called with the same batch and each computes its part of the tokens.
    tp  heads and widths: ranks have the same tokens and each computes its part of the channels.

    Meshes of accelerate's ParallelismConfig have dp_replicate and dp_shard instead of dp; the latter means shard=True.

    model: a FreeEnergyMixer, FEMModel or FEMForCausalLM with the same weights on all ranks. A mixer alone takes its
    rank's part of x, mask and segments; models take whole batches. Every rank's gradients are those of all, as on one
    rank. shard: parameters, gradients and optimizer are divided among the ranks of dp and cp too (FSDP2), instead of
    copied. ring: with cp, keys and values of softmax layers go around the ranks instead of being gathered: less memory,
    more messages; None: on more than FEW ranks. What one rank computes is what one process would, except for rounding.
    """
    sizes = _sizes(mesh)
    mixers = _checked(model, sizes)
    if sizes["cp"] > 1:
        softmax = [mixer for mixer in mixers if mixer.causal and isinstance(mixer.prior, SoftmaxPrior)]
        balanced = any(mixer.prior.window is None for mixer in softmax)  # later tokens cost more
        ring = sizes["cp"] > FEW if ring is None else ring
        cut = Cut(mesh["cp"].get_group(), zigzag=balanced, ring=ring)
        for mixer in mixers:
            cut_mixer(mixer, cut)
        if not isinstance(model, FreeEnergyMixer):
            model.cut_sequence(cut)  # type: ignore[operator]
    if sizes["tp"] > 1:
        parallelize_module(model, mesh["tp"], tensor_plan(model))
    replicas = [name for name in (*BATCH, "cp") if sizes[name] > 1]
    sequences = math.prod(sizes[name] for name in BATCH)
    if (shard or sizes["dp_shard"] > 1) and replicas:
        _shard(model, mesh, replicas, sequences)
    elif replicas:
        together = _Synchronised([mesh[name].get_group() for name in replicas], sequences)
        for parameter in {id(p): p for p in model.parameters() if p.requires_grad}.values():
            parameter.register_hook(together)
    return model


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or not names:
        raise ValueError(f"mesh has dimensions {names}; allowed are names among {', '.join(DIMENSIONS)}")
    if "tp" in names and names[-1] != "tp":
        raise ValueError(f"mesh has dimensions {names}; 'tp' must be the last: its ranks talk the most")
    return {name: mesh[name].size() if name in names else 1 for name in DIMENSIONS}


def _checked(model: nn.Module, sizes: dict[str, int]) -> list[FreeEnergyMixer]:
    """The model's mixers, if all of them, and all else, can be divided."""
    mixers = [module for module in model.modules() if isinstance(module, FreeEnergyMixer)]
    if sizes["cp"] == sizes["tp"] == 1:
        return mixers
    for block in _blocks(model):
        if not isinstance(block.mixer, FreeEnergyMixer):
            raise ValueError(f"mixer={type(block.mixer).__name__} cannot be divided over 'cp' or 'tp'; choose fem")
    if not isinstance(model, FreeEnergyMixer) and type(model).__name__ not in ("FEMModel", "FEMForCausalLM"):
        raise ValueError(f"model is {type(model).__name__}; allowed is FreeEnergyMixer, FEMModel or FEMForCausalLM")
    for mixer in mixers:
        if hasattr(mixer, "cut") or hasattr(mixer, "group"):
            raise ValueError("the model is divided over ranks already")
        if mixer.training and mixer.dropout.p > 0:
            told = "does not fit 'cp' or 'tp': ranks would drop the same; choose 0"
            raise ValueError(f"dropout={mixer.dropout.p} {told}")
        if sizes["tp"] > 1:
            check_heads(mixer, sizes["tp"])
        if sizes["cp"] > 1 and not (isinstance(mixer.prior, SoftmaxPrior) or has_summary(mixer.prior)):
            raise ValueError(f"prior={mixer.prior_name!r} cannot be divided over 'cp': it has no state to pass on")
    return mixers


def _blocks(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "mixer") and hasattr(module, "mlp"))


class HeadParallel(ParallelStyle):
    """For torch's parallelize_module: the heads of a FreeEnergyMixer over the ranks."""

    def __init__(self, known: dict[int, nn.Parameter] | None = None) -> None:
        super().__init__()
        self.known = {} if known is None else known

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, FreeEnergyMixer)
        cut_heads(module, device_mesh, self.known)
        return module


class WidthParallel(HeadParallel):
    """For torch's parallelize_module: the width of a SwiGLU over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut_width(module, device_mesh, self.known)
        return module


class Copied(HeadParallel):
    """For torch's parallelize_module: the module's own parameters on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divide(module, device_mesh, lambda name: None, self.known)
        return module


def tensor_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Tensor parallelism of a model as torch's parallelize_module takes it: style by name of the module."""
    known: dict[int, nn.Parameter] = {}
    plan: dict[str, ParallelStyle] = {}
    divided: list[str] = []
    for name, module in model.named_modules():
        if any(name == above or name.startswith(f"{above}.") for above in divided if above) or "" in divided:
            continue
        if isinstance(module, FreeEnergyMixer):
            plan[name], divided = HeadParallel(known), [*divided, name]
        elif type(module).__name__ == "SwiGLU":
            plan[name], divided = WidthParallel(known), [*divided, name]
        elif any(p is not None for p in module._parameters.values()):
            plan[name] = Copied(known)
    return plan


class _Synchronised:
    """Hook of a parameter: its gradient is the sum over cp and the mean over dp."""

    def __init__(self, groups: list[Any], divisor: int) -> None:
        self.groups, self.divisor = groups, divisor

    def __call__(self, grad: Tensor) -> Tensor:
        own = grad.to_local() if isinstance(grad, DTensor) else grad
        for group in self.groups:
            own = summed(own, group)
        own = own if self.divisor == 1 else own / self.divisor
        if isinstance(grad, DTensor):
            return DTensor.from_local(own, grad.device_mesh, grad.placements, shape=grad.shape, stride=grad.stride())
        return own


def _shard(model: nn.Module, mesh: DeviceMesh, replicas: list[str], mean_over: int) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    copied = [name for name in replicas if name == "dp_replicate"]
    cut = [name for name in replicas if name not in copied]
    over = mesh[tuple(cut)]._flatten("_".join(cut)) if len(cut) > 1 else mesh[(cut or copied)[0]]
    if copied and cut:
        over = mesh[(*copied, "_".join(cut))]
    for block in [*_blocks(model), model]:
        fully_shard(block, mesh=over)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(mean_over)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first
