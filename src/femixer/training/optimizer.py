"""The optimizer of all experiments, and learning rates over a run as functions of the step: 1, 2, ..."""

import math
from collections.abc import Callable

from torch import nn
from torch.optim import AdamW

from femixer.options import check, check_positive


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    fused: bool | None = None,
) -> AdamW:
    """AdamW that decays weight matrices only, embeddings among them.

    Biases, norms and bare parameters are left alone. That includes the inverse temperature: its parameter x in
    beta_max = softplus(x + 1.8) must grow to 10 and beyond where a channel wants its maximum, and there a decay of 0.01
    would pull back a tenth of a full step. Embeddings decay because a table that is tied to the output matrix is that
    matrix: tied or not, the same rule holds for both. fused: one call for all parameters, which models so small that
    calls cost more than numbers should have (2.7 against 0.6 ms for 30 matrices of 64 x 64); None is torch's choice.
    """
    check(0 < learning_rate < 1e38, "learning_rate", learning_rate, "a float32 number above 0")
    check(weight_decay >= 0, "weight_decay", weight_decay, "a number of at least 0")
    check(all(0 <= beta < 1 for beta in betas), "betas", betas, "two numbers from 0 to below 1")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name for name, p in parameters.items() if name.split(".")[-1] == "weight" and p.ndim > 1}
    groups = [
        {"params": [p for name, p in parameters.items() if name in matrices], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in matrices], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas, fused=fused)


Schedule = Callable[[int], float]


def constant(step: int) -> float:
    return 1.0


def cosine(steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A linear rise to 1 at step `warmup`, then half a cosine down to `floor` at the last of `steps` steps."""
    check_positive(steps=steps)
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
    check_positive(steps=steps)
    check(0 <= warmup <= 1, "warmup", warmup, "a share of the steps, between 0 and 1")
    peak = max(warmup * steps - 1, 0.0)

    def factor(step: int) -> float:
        at = step - 1
        if at <= peak:
            return START + (1 - START) * at / peak if peak else 1.0
        return 1 + (END - 1) * (at - peak) / (steps - 1 - peak)

    return factor
