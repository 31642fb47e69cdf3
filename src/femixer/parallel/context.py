"""Context parallelism of a mixer: every rank has some stretches of the sequence and reads them as one rank would.

The mixer's own code runs on the stretches. What lies before them comes from the other ranks: padding, segments and
positions, the states of conditioner and prior, and for the softmax prior all keys and values (softmax.py).

States: a stretch's summary goes out, the state before it comes back. A summary is the state that a stretch leaves when
read from nothing, and the logarithm of its decay: by how much it shrinks what came before it. All ranks' summaries are
gathered in one exchange whose size does not depend on the length. A chain of stretches leaves
sum_i exp(decay_{i+1} + ... + decay_last) state_i. That is associative, so a rank may combine the states of all ranks
before it at once. Axes: V stretches in order, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.conditioner import EPS, TimeDecayConditioner
from femixer.kernels.conditioner import condition
from femixer.kernels.decayed_linear import FastWeights
from femixer.kernels.marks import PADDING, is_end, is_padding, is_start, reversed_marks
from femixer.kernels.pair_state_space import PairSums
from femixer.kernels.reading import Reading
from femixer.kernels.recurrence import linear_recurrence
from femixer.kernels.state_space import Modes
from femixer.layout import Layout, Past, arrange
from femixer.mixer import FreeEnergyMixer
from femixer.parallel.cut import Cut, gathered
from femixer.parallel.heads import swapped
from femixer.priors.aft import ChannelPrior
from femixer.priors.base import DirectedPrior, Prior
from femixer.priors.interactive import InteractivePrior
from femixer.priors.linear import LinearPrior
from femixer.priors.ssm import StateSpacePrior
from femixer.state import State


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
    summarize = next(own for kind, own in _KINDS.items() if isinstance(stretch.prior, kind))
    state = state_before(cut, *summarize(stretch, last), backwards)
    return type(last)(*state) if isinstance(last, tuple) else state[0]


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


class _Ends(NamedTuple):
    """Of a stretch by itself, [B] each: ids of its first and last real token (-1: none), number of its segments, and
    how many real tokens the last of them has."""

    first: Tensor
    last: Tensor
    segments: Tensor
    tokens: Tensor


def cut_layout(cut: Cut, x: Tensor, mask: Tensor | None, segments: Tensor | None) -> Layout:
    """The layout of this rank's stretches x [B stretches, T, ...], with mask and segments as in `arrange`.

    Either is given on all ranks or on none. One exchange of four numbers per stretch, none without both.
    """
    batch, length = x.shape[:2]
    rows = batch // cut.stretches
    if mask is None and segments is None:
        begins = [torch.full((rows if cut.zigzag else 1,), place * length, device=x.device) for place in cut.places]
        return Layout(None, cut.of_stretches(begins)[:, None] + torch.arange(length, device=x.device))
    nothing = torch.full((batch,), -1, device=x.device)
    own, last = arrange(x, mask, segments, Past(0, nothing, nothing, torch.zeros_like(nothing)))
    ids = mask.long() - 1 if segments is None and mask is not None else segments
    assert own.segment is not None and ids is not None
    assert last.identity is not None and last.segment is not None and last.tokens is not None
    begins_at = (own.segment >= 0).long().argmax(1, keepdim=True) if length else None
    first = nothing if begins_at is None else ids.long().gather(1, begins_at)[:, 0].clamp_min(-1)
    ends = torch.stack([first, last.identity, last.segment + 1, last.tokens], -1)
    stretches = [_Ends(*stretch.unbind(-1)) for stretch in cut.in_order(gathered(ends, cut.group))]
    start = (nothing[:rows], nothing[:rows], torch.zeros_like(nothing[:rows]))
    past = [_after(start, stretches[:place]) for place in cut.places]
    following = [_following(_after(start, stretches[: place + 1]), stretches[place + 1 :]) for place in cut.places]
    layout, _ = arrange(x, mask, segments, Past(0, *(cut.of_stretches([*part]) for part in zip(*past, strict=True))))
    return layout._replace(following=cut.of_stretches(following))


Place = tuple[Tensor, Tensor, Tensor]


def _after(place: Place, stretches: list[_Ends]) -> Place:
    """Id of the last real token, number of its segment, and its real tokens so far, as in `Past`, after stretches."""
    identity, segment, tokens = place
    for stretch in stretches:
        real = stretch.segments > 0
        goes_on = real & (stretch.first == identity)
        before = torch.where(goes_on & (stretch.segments == 1), tokens, 0)
        tokens = torch.where(real, stretch.tokens + before, tokens)
        segment = segment + stretch.segments - goes_on.long()
        identity = torch.where(real, stretch.last, identity)
    return identity, segment, tokens


def _following(place: Place, stretches: list[_Ends]) -> Tensor:
    """The segment of the first real token in the stretches after a place; larger than any if there is none."""
    identity, segment, _ = place
    following = torch.full_like(segment, torch.iinfo(segment.dtype).max)
    for stretch in reversed(stretches):
        its = torch.where(stretch.first == identity, segment, segment + 1)
        following = torch.where(stretch.segments > 0, its, following)
    return following


def cut_mixer(mixer: FreeEnergyMixer, cut: Cut) -> None:
    """From now on x is this rank's part of the sequence, [B, T / ranks, dim], and so are mask and segments."""
    from femixer.parallel.softmax import CutSoftmax
    from femixer.priors.softmax import SoftmaxPrior

    if isinstance(mixer.prior, SoftmaxPrior):
        swapped(mixer.prior, CutSoftmax).cut = cut
    elif has_summary(mixer.prior):
        swapped(mixer.prior, CutScan).cut = cut
    else:
        raise ValueError(f"prior={mixer.prior_name!r} cannot be cut over ranks: its state has no rule for it")
    if mixer.conditioner is not None:
        swapped(mixer.conditioner, CutConditioner).cut = cut
    swapped(mixer, CutMixer).cut = cut


class CutMixer(FreeEnergyMixer):
    cut: Cut

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor:
        if state is not None or return_state:
            raise ValueError("state and return_state do not fit a sequence that is cut over ranks")
        self.check_inputs(x, mask, segments, None, False)
        if x.shape[1] % self.cut.stretches:
            raise ValueError(f"x has {x.shape[1]} tokens on this rank; allowed is a multiple of {self.cut.stretches}")
        x = self.cut.fold(x)
        mask, segments = (None if given is None else self.cut.fold(given) for given in (mask, segments))
        y, _ = self._continue(x, mask, segments, self.before(x, None), False)
        return self.cut.unfold(y)

    def arrange(self, x: Tensor, mask: Tensor | None, segments: Tensor | None, past: Past) -> tuple[Layout, Past]:
        return cut_layout(self.cut, x, mask, segments), past

    def inspect(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("a mixer whose sequence is cut over ranks cannot be inspected; inspect it on one rank")


class CutScan(DirectedPrior):
    cut: Cut

    def scan(
        self,
        tracks: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        marks: Tensor | None,
        state: Any,
        keep: bool,
        exclusive: bool,
    ) -> Reading:
        """Twice: what the stretch leaves, then the read from what lies before it. In encoder mode the exclusive scan is
        the one backwards in time."""
        last = super().scan(tracks, v, beta, marks, None, True, False).state
        before = prior_before(self.cut, Stretch(self, tracks, v, beta, marks), last, exclusive)
        return super().scan(tracks, v, beta, marks, before, keep, exclusive)


class CutConditioner(TimeDecayConditioner):
    cut: Cut

    def forward(self, x: Tensor, layout: Layout, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.in_proj(F.layer_norm(x, (self.dim,), eps=EPS))
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        marks = layout.marks()
        if x.shape[0] == 0 or x.shape[1] == 0:
            return condition(y, marks, None, self.causal, EPS)
        gates = F.logsigmoid(-y[..., : self.channels].double())  # -softplus
        _, last = condition(y, marks, None, True, EPS)
        before = self._carried(last, total_decay(gates, marks), False)
        if self.causal:
            return condition(y, marks, before.to(y.dtype), True, EPS)
        return self._both_ways(y, gates, marks, before), last

    def _carried(self, last: Tensor, decay: Tensor, backwards: bool) -> Tensor:
        return state_before(self.cut, (last, decay), lambda *given: (carried_sums(*given),), backwards)[0]

    def _both_ways(self, y: Tensor, gates: Tensor, marks: Tensor | None, before: Tensor) -> Tensor:
        """As in femixer.kernels.conditioner, from a state on either side."""
        _, u, a = y.chunk(3, -1)
        u, ahead = u.double(), gates
        decay = total_decay(gates.flip(1), reversed_marks(marks))
        if marks is not None:
            padding, start, end = (found(marks)[..., None] for found in (is_padding, is_start, is_end))
            gates, u = gates.masked_fill(padding, 0), u.masked_fill(padding, 0)
            gates, ahead = gates.masked_fill(start, -torch.inf), gates.masked_fill(end, -torch.inf)
        ahead = ahead.exp().flip(1)
        nothing = torch.zeros_like(before)
        last = linear_recurrence(ahead, u.flip(1), nothing)[:, -1]
        after = self._carried(last, decay, True)
        # Without the token itself, which counts once: later_t = decay_t (u_{t+1} + later_{t+1}).
        later = linear_recurrence(ahead, u.flip(1), after)
        later = ahead * torch.cat([after[:, None], later[:, :-1]], 1)
        h = linear_recurrence(gates.exp(), u, before) + later.flip(1)
        direction = F.normalize(F.softplus(a), dim=-1)
        return F.silu(direction) * F.layer_norm(h.to(y.dtype), h.shape[-1:], eps=EPS)
