"""How many parameters a model has."""

from __future__ import annotations

import torch
from torch import nn

from femixer.models.config import FEMConfig
from femixer.models.language import FEMForCausalLM
from femixer.models.vision import FEMForImageClassification, FEMVisionConfig


def parameter_count(config: FEMConfig | FEMVisionConfig) -> int:
    """Of the language model or the image classifier, without making it."""
    with torch.device("meta"):  # nothing is stored, so the large ones are counted as quickly as the small ones
        if isinstance(config, FEMVisionConfig):
            return FEMForImageClassification(config).num_parameters()
        return FEMForCausalLM(config).num_parameters()


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
