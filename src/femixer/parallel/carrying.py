"""What a chain of stretches leaves behind: the prefix combination of context parallelism.

A stretch, read from nothing, leaves a state and the logarithm of its decay: by how much it shrinks what came before it.
A chain of stretches leaves sum_i exp(decay_{i+1} + ... + decay_last) state_i. That is associative, so a rank may
combine the states of all ranks before it at once. Axes: V stretches in order, B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reach(decay: Tensor, place: int) -> Tensor:
    """decay [V, ...] -> logarithm [V, ...] of how much is left of stretch i where stretch `place` begins.

    No difference of sums is taken: a decay of -inf, a segment that starts in a stretch, forgets exactly.
    """
    index = torch.arange(len(decay), device=decay.device).view(-1, *[1] * (decay.dim() - 1))
    between = decay.masked_fill(index >= place, 0)
    after = torch.cat([between[1:], torch.zeros_like(between[:1])])
    return after.flip(0).cumsum(0).flip(0).masked_fill(index >= place, -torch.inf)


def carried_sums(sums: Tensor, decay: Tensor, place: int) -> Tensor:
    """Sums [V, B, ...] with decays that broadcast to them -> [B, ...] where stretch `place` begins."""
    return (reach(decay, place).exp() * sums).sum(0)


def carried_energies(energies: Tensor, top: Tensor, decay: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Sums of exponentials relative to exp(top) -> the same of the chain, relative to its own top, a constant.

    energies [V, B, ..., M, D], top [V, B, ..., 1, D] and decays that broadcast to [V, B, ..., M, D]: M modes decay on
    their own. The top of a chain is the largest of its stretches' as they decay with the slowest mode; -inf for none.
    """
    left, top = reach(decay, place), top.detach()
    highest = (top + left.detach().amax(-2, keepdim=True)).amax(0)
    below = torch.where(highest > -torch.inf, top - highest, -torch.inf)
    return ((left + below).exp() * energies).sum(0), highest


def carried_reads(state: Tensor, decay: Tensor, beta: Tensor | None, place: int) -> Tensor:
    """Reads in log space: state [V, B, 3, C] of log total, mean and free energy, decay [V, B, C], beta [C].

    The total is the sum of the decayed totals, the mean and exp(beta F) are means under their shares of it.
    """
    log_total, mean, free = state.unbind(2)
    weight = reach(decay, place) + log_total
    there = (weight > -torch.inf).any(0)
    weight = torch.where(there, weight, 0)
    total = weight.logsumexp(0)
    rows = [total, (weight.softmax(0) * mean).sum(0), torch.zeros_like(total)]
    if beta is not None:
        rows[2] = ((weight + beta * free).logsumexp(0) - total) / beta
    nothing = (-torch.inf, 0.0, 0.0)
    return torch.stack([row.masked_fill(~there, empty) for row, empty in zip(rows, nothing, strict=True)], 1)
