"""What a generator is asked for, and what it answers."""

from dataclasses import dataclass

import numpy as np

IGNORE = -100
"""Target of positions that are not scored."""

Pair = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, int64 [n, T] each."""


@dataclass(frozen=True)
class Draw:
    """n sequences of one split."""

    n: int
    training: bool
    """Training and testing sequences differ in targets (recall), or also in how they are drawn (fuzzy recall)."""
    seed: int
    """For what is the same in all splits; everything else comes from `rng`."""
    rng: np.random.Generator


def next_token(sequence: np.ndarray, scored: np.ndarray, training: bool) -> Pair:
    """Shifted by one, [n, T + 1] -> [n, T]: training predicts all of `sequence`, a test what `scored` holds of it."""
    return sequence[:, :-1], (sequence if training else scored)[:, 1:]
