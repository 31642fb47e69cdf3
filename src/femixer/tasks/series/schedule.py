"""The learning rate of the protocol."""

from __future__ import annotations

from femixer.options import check
from femixer.training.schedule import Schedule

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
