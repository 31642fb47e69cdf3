"""Context parallelism of a mixer: every rank has some stretches of the sequence and reads them as one rank would.

The mixer's own code runs on the stretches. What lies before them comes from the other ranks: positions and segments
(places.py), the states of conditioner and prior (summaries.py), and for the softmax prior all keys and values.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.conditioner import EPS, TimeDecayConditioner
from femixer.kernels.conditioner import condition
from femixer.kernels.marks import is_end, is_padding, is_start, reversed_marks
from femixer.kernels.reading import Reading
from femixer.kernels.recurrence import linear_recurrence
from femixer.layout import Layout, Past
from femixer.mixer import FreeEnergyMixer
from femixer.parallel.carrying import carried_sums
from femixer.parallel.cut import Cut
from femixer.parallel.places import cut_layout
from femixer.parallel.summaries import Stretch, has_summary, prior_before, state_before, total_decay
from femixer.parallel.swapping import swapped
from femixer.priors.directed import DirectedPrior
from femixer.state import State


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
