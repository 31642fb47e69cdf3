"""States of priors and conditioner across ranks: a stretch's summary goes out, the state before it comes back.

A summary is the state that a stretch leaves when read from nothing, and the logarithm of its decay: by how much it
shrinks what came before it. All ranks' summaries are gathered in one exchange whose size does not depend on the length.
A chain of stretches leaves sum_i exp(decay_{i+1} + ... + decay_last) state_i. That is associative, so a rank may
combine the states of all ranks before it at once. Axes: V stretches in order, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.decayed_linear import FastWeights
from femixer.kernels.marks import PADDING, is_padding, is_start
from femixer.kernels.pair_state_space import PairSums
from femixer.kernels.state_space import Modes
from femixer.parallel.cut import Cut
from femixer.parallel.exchange import gathered
from femixer.priors.aft import ChannelPrior
from femixer.priors.base import Prior
from femixer.priors.interactive import InteractivePrior
from femixer.priors.linear import LinearPrior
from femixer.priors.ssm import StateSpacePrior


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


Carry = Callable[..., tuple[Tensor, ...]]


def total_decay(gate: Tensor, marks: Tensor | None) -> Tensor:
    """Sum of the log decays gate [B, T, ...] of a stretch, float64 [B, ...]; -inf if a segment starts in it."""
    if marks is None:
        return gate.sum(1, dtype=torch.float64)
    shape = [*marks.shape, *[1] * (gate.dim() - 2)]
    total = gate.masked_fill(is_padding(marks).view(shape), 0).sum(1, dtype=torch.float64)
    return total.masked_fill(is_start(marks).any(1).view(shape[:1] + shape[2:]), -torch.inf)


def state_before(cut: Cut, summary: tuple[Tensor, ...], carry: Carry, backwards: bool) -> tuple[Tensor, ...]:
    """The state before each of this rank's stretches, in the order in which they are read.

    summary: of this rank's stretches, [B stretches, ...] each; carry(*summaries [V, B, ...], place) -> the state that
    the stretches before `place` leave.
    """
    shapes = [part.shape[1:] for part in summary]
    sizes = [math.prod(shape) for shape in shapes]
    packed = torch.cat([part.flatten(1).double() for part in summary], 1)
    parts = cut.in_order(gathered(packed, cut.group)).split(sizes, -1)
    everything = [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]
    places = cut.places
    if backwards:
        everything, places = [part.flip(0) for part in everything], [cut.count - 1 - place for place in places]
    states = [carry(*everything, place) for place in places]
    return tuple(cut.of_stretches([*parts]) for parts in zip(*states, strict=True))


class Stretch(NamedTuple):
    """What a prior reads: its tracks [B, T, ...], values [B, T, G, D], beta [G, D] and marks [B, T]."""

    prior: Any
    tracks: dict[str, Tensor]
    v: Tensor
    beta: Tensor | None
    marks: Tensor | None


def prior_before(cut: Cut, stretch: Stretch, last: Any, backwards: bool) -> Any:
    """The state of a prior before this rank's stretches; `last` is the one that they leave when read from nothing."""
    for kind, summarize in _KINDS.items():
        if isinstance(stretch.prior, kind):
            summary, carry = summarize(stretch, last)
            state = state_before(cut, summary, carry, backwards)
            return type(last)(*state) if isinstance(last, tuple) else state[0]
    raise TypeError(f"{type(stretch.prior).__name__} has no state that ranks can pass on")


def has_summary(prior: Prior) -> bool:
    return isinstance(prior, tuple(_KINDS))


Summary = tuple[tuple[Tensor, ...], Carry]


def _linear(stretch: Stretch, last: FastWeights) -> Summary:
    _, tracks, v, beta, marks = stretch
    gate, width = tracks.get("gate"), v.shape[-1]
    decay = total_decay(v.new_zeros(*v.shape[:2], 1, 1) if gate is None else gate, marks)

    def carry(sums: Tensor, top: Tensor, decay: Tensor, place: int) -> tuple[Tensor, ...]:
        sums, energies, decay = sums[..., : width + 1], sums[..., width + 1 :], decay[..., None]
        sums = carried_sums(sums, decay, place)
        if beta is None:
            return sums, top[0]
        energies, highest = carried_energies(energies, top[..., None, :], decay, place)
        # The largest exponential of each channel is one.
        largest = energies.detach().amax(-2, keepdim=True)
        scale = torch.where(largest > 0, largest, 1)
        return torch.cat([sums, energies / scale], -1), (highest + scale.log())[..., 0, :]

    return (*last, decay), carry


def _channels(stretch: Stretch, last: Tensor) -> Summary:
    _, tracks, v, beta, marks = stretch
    gate = tracks["gate"].flatten(-2) if "gate" in tracks else torch.zeros_like(v.flatten(-2))
    warmth = None if beta is None else beta.flatten().double()

    def carry(state: Tensor, decay: Tensor, place: int) -> tuple[Tensor, ...]:
        return (carried_reads(state, decay, warmth, place),)

    return (last, total_decay(gate, marks)), carry


def _state_space(stretch: Stretch, last: Modes) -> Summary:
    prior, tracks, v, _, marks = stretch
    system = prior.system(tracks, v.dtype)
    step = torch.ones_like(v.flatten(-2)) if system.step is None else system.step
    # Segments after the product: zero times infinity is not a number.
    steps = total_decay(step, None if marks is None else marks & PADDING)
    decay = steps[:, None] * system.rate.double()
    if marks is not None:
        decay = decay.masked_fill(is_start(marks).any(1)[:, None, None], -torch.inf)
    return (*last, decay), _carry_modes


def _carry_modes(sums: Tensor, top: Tensor, decay: Tensor, place: int) -> tuple[Tensor, ...]:
    """sums [V, B, 3, N, C] of 1, v and exp(beta v - top); top [V, B, C]; decay [V, B, N, C]."""
    decay = decay[:, :, None]
    energies, highest = carried_energies(sums[:, :, 2:], top[:, :, None, None], decay, place)
    return torch.cat([carried_sums(sums[:, :, :2], decay, place), energies], 1), highest[:, 0, 0]


def _pairs(stretch: Stretch, last: PairSums) -> Summary:
    def carry(sums: Tensor, top: Tensor, decay: Tensor, place: int) -> tuple[Tensor, ...]:
        sums, top = _carry_modes(sums.mT, top, decay.mT, place)  # [V, B, 3, N, H]
        return sums.mT, top

    return (*last, total_decay(stretch.tracks["gate"], stretch.marks)), carry


_KINDS: dict[type[Prior], Callable[[Stretch, Any], Summary]] = {
    LinearPrior: _linear,
    ChannelPrior: _channels,
    StateSpacePrior: _state_space,
    InteractivePrior: _pairs,
}
