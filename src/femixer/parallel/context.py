"""Context parallelism of a mixer: every rank has some stretches of the sequence and reads them as one rank would.

The mixer's own code runs on the stretches. What lies before them comes from the other ranks: padding, segments and
positions, the states of conditioner and prior (summaries.py), and for the softmax prior all keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.conditioner import EPS, TimeDecayConditioner
from femixer.kernels.conditioner import condition
from femixer.kernels.marks import is_end, is_padding, is_start, reversed_marks
from femixer.kernels.reading import Reading
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import Layout, Past, arrange
from femixer.mixer import FreeEnergyMixer
from femixer.parallel.cut import Cut
from femixer.parallel.exchange import gathered
from femixer.parallel.summaries import Stretch, carried_sums, has_summary, prior_before, state_before, total_decay
from femixer.parallel.weights import swapped
from femixer.priors.base import DirectedPrior
from femixer.state import State


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
        y, _ = self._mix(x, mask, segments, self.before(x, None), False)
        return self.cut.unfold(y)

    def _arrange(self, x: Tensor, mask: Tensor | None, segments: Tensor | None, past: Past) -> tuple[Layout, Past]:
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
        def carry(sums: Tensor, decay: Tensor, place: int) -> tuple[Tensor, ...]:
            return (carried_sums(sums, decay, place),)

        return state_before(self.cut, (last, decay), carry, backwards)[0]

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
