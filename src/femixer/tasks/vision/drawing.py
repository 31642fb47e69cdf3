"""Random numbers of augmentations, one at a time from a generator."""

from __future__ import annotations

import numpy as np
import torch
from torch import Generator


def uniform(generator: Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def normal(generator: Generator, mean: float, deviation: float) -> float:
    return mean + deviation * torch.randn((), generator=generator, dtype=torch.float64).item()


def integer(generator: Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=generator))


def sign(generator: Generator) -> int:
    return 1 - 2 * integer(generator, 2)


def beta(generator: Generator, alpha: float) -> float:
    """Of the distribution Beta(alpha, alpha), which torch draws only from its global generator."""
    return float(np.random.default_rng(integer(generator, 2**62)).beta(alpha, alpha))
