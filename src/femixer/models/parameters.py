"""How many parameters a model has, without making it."""

from __future__ import annotations

import torch

from femixer.models.config import FEMConfig
from femixer.models.language import FEMForCausalLM


def parameter_count(config: FEMConfig) -> int:
    with torch.device("meta"):  # nothing is stored, so the large ones are counted as quickly as the small ones
        return FEMForCausalLM(config).num_parameters()
