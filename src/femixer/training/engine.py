"""How a model is trained on the hardware at hand: device, precision, several processes, sharding, compilation; and how
much memory there is: what cannot fit is refused before it is made.

Nothing here changes what is computed, except for rounding.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from femixer.optional import require
from femixer.options import Count, check, check_options
from femixer.pieces import joined
from femixer.training import distributed
from femixer.training.distributed import Part

Divide = Callable[[nn.Module, Any, bool], Any]
"""(model, mesh with dimensions dp, cp and tp, whether weights are sharded too): divides the model in place."""


@dataclass(frozen=True)
class EngineOptions:
    """How training uses the hardware. A run may be resumed with other values."""

    precision: Literal["no", "bf16"] = "no"
    """Mixed precision: bf16 multiplies matrices in bfloat16; weights and their updates stay float32."""
    accumulate: Count = 1
    """Pieces into which a process splits its share of a batch: less memory, the same gradient."""
    shard: Literal["none", "full"] = "none"
    """Several processes (torchrun): none keeps a copy of the model in each (DDP);
    full divides weights, gradients and optimizer among them (FSDP2)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpointing: bool = False
    """Gradient checkpointing: keep only the input of each block and recompute the rest; less memory, more time."""
    context_parallel: Count = 1
    """Processes that share each sequence (docs/scaling.md)."""
    tensor_parallel: Count = 1
    """Processes that share the heads and widths of each layer (docs/scaling.md)."""

    @property
    def copies(self) -> int:
        """Processes that have the same part of a batch."""
        return self.context_parallel * self.tensor_parallel

    def parts(self, processes: int) -> int:
        """Parts of a batch that so many processes have."""
        why = f"{self.context_parallel} x {self.tensor_parallel} (context_parallel x tensor_parallel)"
        check(processes % self.copies == 0, "processes", processes, f"a multiple of {why}; torchrun starts them")
        return processes // self.copies

    def validate(self) -> None:
        check_options(self)
        check(not (self.compile and self.copies > 1), "compile", True, f"False with {self.copies} processes per part")


class Engine:
    """A model on its device and in its processes.

    `model` is the caller's own module, for evaluation, generation and saving; training calls `called`, which may be
    compiled and wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        blocks: Sequence[str] | None = None,
        divide: Divide | None = None,
    ) -> None:
        """blocks: class names of the submodules that are sharded one by one, by default `_no_split_modules`."""
        options.validate()
        self.model, self.options = model, options
        self.device = distributed.start()
        accelerate = require("accelerate", "cli")
        # Mixed precision is ours: accelerate's would turn the logits into float32 once more, the largest tensor of all.
        self.accelerator = accelerate.Accelerator(cpu=self.device.type == "cpu", mixed_precision="no")
        options.parts(distributed.world())
        distributed.share_parts(options.copies)
        self.sharded = options.shard == "full" and distributed.world() > options.tensor_parallel
        if options.checkpointing:
            enable = getattr(model, "gradient_checkpointing_enable", None)
            check(enable is not None, "checkpointing", True, f"False: {type(model).__name__} does not offer it")
            enable()  # type: ignore[misc]
        self.called: Any = model
        if options.copies > 1:
            from torch.distributed.device_mesh import init_device_mesh

            check(divide is not None, "processes per part", options.copies, "1: this model cannot be divided")
            sizes = (distributed.part().count, options.context_parallel, options.tensor_parallel)
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "cp", "tp"))
            divide(model.to(self.device), mesh, self.sharded)  # type: ignore[misc]
        elif self.sharded:
            self._shard(blocks)
        else:
            self.called = self.accelerator.prepare_model(torch.compile(model) if options.compile else model)

    def _shard(self, blocks: Sequence[str] | None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        names = set(blocks or getattr(self.model, "_no_split_modules", None) or ())
        parts = [module for module in self.model.modules() if type(module).__name__ in names]
        check(bool(parts) or not names, "blocks", sorted(names), f"names of classes in {type(self.model).__name__}")
        low = torch.bfloat16 if self.options.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        mesh = init_device_mesh(self.device.type, (distributed.world(),))
        for module in parts:
            if self.options.compile:
                module.compile()
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    @property
    def parts(self) -> list[Part]:
        """The parts of each global batch that are this process's: `accumulate` of processes x accumulate."""
        return distributed.own_parts(self.options.accumulate)

    def place(self, batch: Any) -> Any:
        """The batch on the device: tensors in tuples, lists and dictionaries."""
        if self.device.type == "cpu":
            return batch
        return require("accelerate.utils", "cli").send_to_device(batch, self.device, non_blocking=True)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16")

    def backward(
        self,
        pieces: Sequence[Any],
        losses: Callable[[Any, Any], Mapping[str, Tensor]],
        scale: float,
        seeds: Sequence[int],
    ) -> dict[str, Tensor]:
        """Add up the gradients of scale * sum of the losses over all pieces of all processes.

        Returns the sums of each loss over this process's pieces.
        """
        sums: dict[str, Tensor] = {}
        for number, (piece, seed) in enumerate(zip(pieces, seeds, strict=True), 1):
            with self._synchronise(number == len(pieces)):
                torch.manual_seed(seed)
                with self.autocast():
                    parts = losses(self.called, self.place(piece))
                # DDP and FSDP average the gradients of the parts, where the sum is wanted.
                (torch.stack([*parts.values()]).sum() * (scale * distributed.part().count)).backward()
            for name, value in parts.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return sums

    def _synchronise(self, now: bool) -> AbstractContextManager[Any]:
        """Let backward combine the gradients of the processes, or leave that to a later one."""
        if self.sharded:
            self.called.set_requires_gradient_sync(now)
            return nullcontext()
        return nullcontext() if now or self.options.copies > 1 else self.accelerator.no_sync(self.called)

    def clip(self, largest: float | None) -> Tensor:
        """The norm of all gradients together; they are shrunk to `largest` where they exceed it."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if largest is not None:
            clip_grads_with_norm_(parameters, largest, norm)
        return norm


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights of a trained model on the CPU, in the main process; nothing in the others, which must call it too.

    Tied weights stay one tensor under all their names.
    """
    named = model.state_dict(keep_vars=True)
    whole = {}
    for tensor in {id(tensor): tensor for tensor in named.values()}.values():
        value = tensor.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value  # every process takes part
        if distributed.is_main():
            whole[id(tensor)] = value.cpu()
    return joined(model, {name: whole[id(tensor)] for name, tensor in named.items() if id(tensor) in whole})


GROUPS = {
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current", "inactive_file"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Where a container's memory is told, by version 2 and 1 of control groups: files of the limit and of what is used, and
the line of memory.stat with what of that are copies of files, which give way."""


def installed_bytes() -> int:
    """Bytes of main memory that this machine has, or its container may use."""
    return min([require("psutil", "cli").virtual_memory().total, *(limit for limit, _ in _groups())])


def _groups() -> Iterator[tuple[int, int]]:
    """The limit of the container and what it uses of that, in bytes; 0 where only the limit is told."""
    for folder, (limit, used, of_files) in GROUPS.items():
        try:
            most = int((folder / limit).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
        try:
            now = int((folder / used).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            yield most, max(0, now - int(stat[of_files]))
        except (OSError, ValueError, KeyError):
            yield most, 0


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = require("psutil", "cli").virtual_memory().available
    return min([available, *(max(0, limit - used) for limit, used in _groups())])


def check_fits(parameters: int, name: str, value: object) -> None:
    """Raise a ValueError if a model of so many parameters cannot be trained here. name, value: of the option.

    A parameter takes 16 bytes: itself, its gradient and Adam's two moments in float32. Where there is a GPU only the
    model itself is made in main memory, and several processes may share one.
    """
    alone = not torch.cuda.is_available() and os.environ.get("WORLD_SIZE", "1") == "1"
    there, needed = installed_bytes(), parameters * (16 if alone else 4)
    what = "in training" if alone else "alone"
    allowed = f"smaller sizes: {parameters:,} parameters take {gigabytes(needed)} {what}"
    check(needed <= there, name, value, f"{allowed}, and this machine has {gigabytes(there)}")


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e10 else f"{size / 1e9:.1f} GB"
