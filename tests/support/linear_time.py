"""Priors whose weights come from a scan, with gates and values of every kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from matrix import noise
from torch import Tensor

from femixer import FreeEnergyMixer
from femixer.priors import PRIORS, Prior
from femixer.priors.base import DirectedPrior

LINEAR_TIME = [name for name, kind in PRIORS.items() if issubclass(kind, DirectedPrior)]


# Options of a prior that change how it scans; few modes keep the dense weights of long sequences small.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gla": [{"decay": "head"}, {"decay": "channel"}],
    "ssm": [{"state_size": 3}],
    "mamba": [{"state_size": 3}],
    "mamba-interactive": [{"state_size": 3}],
}


DIM, HEADS, WIDTH = 16, 2, 4


class Case(NamedTuple):
    prior: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.prior, *map(str, self.options.values())])

    def build(self, **more: Any) -> FreeEnergyMixer:
        given = {"dim": DIM, "heads": HEADS, "prior_options": self.options, **more}
        torch.manual_seed(0)
        return FreeEnergyMixer(prior=self.prior, **given)

    def without_rope(self, **more: Any) -> FreeEnergyMixer:
        return self.build(rope=False if PRIORS[self.prior].queries_and_keys else None, **more)

    def gates(self) -> list[str]:
        """Kinds of gates worth a test: priors without input-dependent gates have one."""
        gated = any(columns.additive for columns in self.build().prior.columns().values())
        return ["open", "closing", "mixed"] if gated else ["own"]


CASES = [Case(name, options) for name in LINEAR_TIME for options in OPTIONS.get(name, [{}])]


EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


def gates_as_given(prior: Prior, gates: str) -> None:
    """Take a prior's own part out of its gates; of mixed gates per key channel some rows fade fast, others never."""
    with torch.no_grad():
        for name, parameter in prior.named_parameters():
            if name in ("decay_bias", "delta_bias"):
                parameter.zero_()
            elif name in ("decay_map", "delta_map"):
                pattern = torch.tensor([1.0, -1.0, 1.0, 0.0])[torch.arange(parameter.shape[0]) % 4]
                parameter.copy_((pattern if gates == "mixed" else pattern.new_ones(pattern.shape))[:, None])


def values(kind: str, length: int, beta: Tensor) -> Tensor:
    """[1, length, G, 4], the last axis one pattern each; wild ones have |beta v| up to 1e4."""
    groups = beta.shape[0]
    random = noise(length, groups, seed=11)
    ramp = torch.linspace(-1, 1, length, dtype=torch.float64)[:, None].expand(-1, groups)
    if kind == "tame":
        patterns = [random, 1e-3 * random, 5 * ramp, random + 100]
    else:
        size = 1e4 / beta.double()
        giant = (torch.arange(length) == length // 4)[:, None]
        patterns = [
            size[:, 0] * random / random.abs().max(),
            size[:, 1] * ramp,
            -size[:, 2] * ramp,
            torch.where(giant, size[:, 3], random),
        ]
    return torch.stack(patterns, -1)[None].float()
