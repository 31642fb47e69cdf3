"""Layout of a batch: which tokens are real, where segments start, and the position of each token in its segment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.marks import END, PADDING, START


class Past(NamedTuple):
    """What a stream remembers about the layout of its past. `seen` counts all tokens; the tensors [B] exist once there
    was padding or segments.

    identity: segment id of the last real token (-1: none yet); segment: number of its segment (-1: none yet);
    tokens: real tokens of that segment so far.
    """

    seen: int = 0
    identity: Tensor | None = None
    segment: Tensor | None = None
    tokens: Tensor | None = None


class Layout(NamedTuple):
    """segment [B, T]: number of the token's segment, -1 for padding. position [B, T] or [1, T]: number of real tokens
    before it in its segment. padding: bool [B, T].

    segment and padding are None if every token is real and of one segment. following [B]: segment of the first real
    token after this layout, if the sequence is known to continue.
    """

    segment: Tensor | None
    position: Tensor
    padding: Tensor | None = None
    following: Tensor | None = None

    @property
    def starts(self) -> Tensor | None:
        """bool [B, T]: the first real token of a segment."""
        return None if self.segment is None else (self.segment >= 0) & (self.position == 0)

    @property
    def ends(self) -> Tensor | None:
        """bool [B, T]: the last real token of a segment (as far as is known)."""
        if self.segment is None:
            return None
        segment, none = self.segment, torch.iinfo(self.segment.dtype).max
        # Segment of the next real token, computed from the end; the running minimum skips padding.
        later = segment.masked_fill(segment < 0, none)
        behind = torch.full_like(later[:, :1], none) if self.following is None else self.following[:, None]
        later = torch.cat([later[:, 1:], behind], 1)
        following = later.flip(1).cummin(1).values.flip(1)
        return (segment >= 0) & (following != segment)

    def marks(self) -> Tensor | None:
        """int8 [B, T], bits of femixer.kernels.marks; None if every token is real and of one segment."""
        if self.segment is None:
            return None
        padding, starts, ends = self.padding, self.starts, self.ends
        assert padding is not None and starts is not None and ends is not None
        return (padding * PADDING + starts * START + ends * END).to(torch.int8)


def segments_together(before: Tensor | None, seen: int, segment: Tensor | None, x: Tensor) -> Tensor | None:
    """Concatenated segments [B, seen + T] of `seen` earlier tokens and of the tokens x [B, T, ...].

    None stands for "all real and of one segment"; the result is None if both are.
    """
    if before is None and segment is None:
        return None
    batch, length = x.shape[:2]
    if before is None:
        before = torch.zeros(batch, seen, dtype=torch.long, device=x.device)
    if segment is None:
        segment = torch.zeros(batch, length, dtype=torch.long, device=x.device)
    return torch.cat([before, segment], 1)


def arrange(x: Tensor, mask: Tensor | None, segments: Tensor | None, past: Past) -> tuple[Layout, Past]:
    """Layout of the tokens x [B, T, ...] that follow `past`, and the past including them.

    mask [B, T] bool: False is padding. segments [B, T] int: a change of id between real tokens starts a segment,
    negative is padding. Tokens without segments continue the last segment of the past (id 0 if there is none).
    """
    batch, length = x.shape[:2]
    if mask is None and segments is None and past.identity is None:
        position = torch.arange(past.seen, past.seen + length, device=x.device)[None]
        return Layout(None, position), Past(past.seen + length)
    identity, last_segment, tokens = past.identity, past.segment, past.tokens
    if identity is None or last_segment is None or tokens is None:
        identity = last_segment = torch.full((batch,), 0 if past.seen else -1, device=x.device)
        tokens = torch.full_like(identity, past.seen)
    if segments is not None:
        ids = segments.long()
    else:
        ids = identity.clamp_min(0)[:, None].expand(batch, length)
        ids = ids if mask is None else ids.masked_fill(~mask, -1)
    # Prepend the last real token of the past, so that one rule holds for every token.
    ids = torch.cat([identity[:, None], ids], 1)
    real = ids >= 0
    index = torch.arange(length + 1, device=x.device).expand_as(ids)
    last_real = index.masked_fill(~real, 0).cummax(1).values
    previous = ids.gather(1, torch.cat([last_real[:, :1], last_real[:, :-1]], 1))
    start = real & (ids != previous)
    start[:, 0] = False
    segment = last_segment[:, None] + start.cumsum(1)
    count = real.cumsum(1) - real[:, :1].long() + tokens[:, None]
    before = (count - 1).masked_fill(~start, 0).cummax(1).values
    in_segment = count - before
    position = (in_segment - 1).masked_fill(~real, 0)[:, 1:]
    layout = Layout(segment.masked_fill(~real, -1)[:, 1:], position, ~real[:, 1:])
    last = ids.gather(1, last_real[:, -1:])[:, 0]
    return layout, Past(past.seen + length, last, segment[:, -1], in_segment[:, -1])
