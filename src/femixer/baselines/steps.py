"""How published state spaces start the steps delta = softplus(... + bias) between their tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from femixer.conditioner import inverse_softplus

SHORTEST, LONGEST = 1e-3, 1e-1


def random_steps_(bias: Tensor) -> Tensor:
    """Fill a bias b so that softplus(b) is random, evenly in log, between 0.001 and 0.1."""
    with torch.no_grad():
        logs = torch.empty_like(bias, dtype=torch.float64).uniform_(math.log(SHORTEST), math.log(LONGEST))
        return bias.copy_(inverse_softplus(logs.exp()))
