"""Dividing pictures into parts, the same parts whatever is trained on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from femixer.training import generator

SEED = 0
"""Of all divisions: that of a training has no say in them."""


def stratified(labels: Tensor, share: float, purpose: str) -> tuple[Tensor, Tensor]:
    """The numbers of the rest and of the part that is held out, both rising: round(share * N) of all N.

    Of each class its share, rounded down, and one more for those that lose most by that. The last of a class is never
    held out.
    """
    order = torch.randperm(len(labels), generator=generator(SEED, purpose))
    members = {label: order[labels[order] == label] for label in labels.unique().tolist()}
    wanted = {label: min(share * len(own), len(own) - 1) for label, own in members.items()}
    counts = {label: math.floor(number) for label, number in wanted.items()}
    left = round(share * len(labels)) - sum(counts.values())
    for label in sorted(wanted, key=lambda label: counts[label] - wanted[label])[: max(left, 0)]:
        counts[label] += counts[label] < wanted[label]
    held = torch.cat([own[: counts[label]] for label, own in members.items()]).sort().values
    return without(len(labels), held), held


def without(count: int, held: Tensor) -> Tensor:
    """The numbers 0 to count - 1 that are not held."""
    kept = torch.ones(count, dtype=torch.bool)
    kept[held] = False
    return kept.nonzero()[:, 0]
