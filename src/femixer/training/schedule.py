"""Learning rates over a run: the factor of step 1, 2, ... as a function of the step alone."""

import math
from collections.abc import Callable

from femixer.options import check

Schedule = Callable[[int], float]


def constant(step: int) -> float:
    return 1.0


def cosine(steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A linear rise to 1 at step `warmup`, then half a cosine down to `floor` at the last of `steps` steps."""
    check(steps > 0, "steps", steps, "a whole number above 0")
    check(0 <= warmup <= steps, "warmup", warmup, f"between 0 and steps={steps}")
    check(0 <= floor <= 1, "floor", floor, "a fraction of the learning rate, between 0 and 1")

    def factor(step: int) -> float:
        if step <= warmup:
            return step / warmup
        fallen = (step - warmup) / (steps - warmup)
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(fallen, 1.0))) / 2

    return factor


START, END = 1 / 25, 1 / 250_000
"""Shares of the largest rate at the first and at the last step, torch's defaults."""


def one_cycle(steps: int, warmup: float = 0.05) -> Schedule:
    """Up from START to 1 in a share `warmup` of the steps and down to END, both linear.

    torch's OneCycleLR(pct_start=warmup, anneal_strategy="linear", cycle_momentum=False), as a function of the step.
    """
    check(steps > 0, "steps", steps, "a whole number above 0")
    check(0 <= warmup <= 1, "warmup", warmup, "a share of the steps, between 0 and 1")
    peak = max(warmup * steps - 1, 0.0)

    def factor(step: int) -> float:
        at = step - 1
        if at <= peak:
            return START + (1 - START) * at / peak if peak else 1.0
        return 1 + (END - 1) * (at - peak) / (steps - 1 - peak)

    return factor
