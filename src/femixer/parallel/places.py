"""Padding, segments and positions of a sequence that is cut over ranks: what stands where, as on one rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.layout import Layout, Past, arrange
from femixer.parallel.cut import Cut
from femixer.parallel.exchange import gathered


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
