"""Heads of mixers over ranks by transformers' own plan: from_pretrained(..., tp_plan="auto").

transformers makes a model, says which ranks divide which module, and fills in the weights. A mixer's projections hold
several names side by side, which no placement of a tensor can cut, so it is loaded whole and divided afterwards.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from femixer.mixer import FreeEnergyMixer
from femixer.models.config import HEADS_STYLE
from femixer.parallel.heads import cut_heads


class HeadsOverRanks(TensorParallelLayer):
    """The style of a mixer in a plan: it notes the ranks."""

    def install_forward(self, module: Any, mesh: Any) -> Any:
        module.heads_over = mesh
        return module


def register_heads() -> None:
    styles: Any = ALL_PARALLEL_STYLES  # whose annotations say functions, and whose entries are styles
    styles.register(HEADS_STYLE, HeadsOverRanks())


def divide_mixers(model: nn.Module) -> None:
    """Divide the mixers that a plan named; rivals, and what is divided already (FSDP), stay as they are."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        mesh = module.__dict__.pop("heads_over", None)
        if mesh is None or not isinstance(module, FreeEnergyMixer):
            continue
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            cut_heads(module, mesh, known)
