"""Who sees whom, and the attention calls that it takes where a mask is needed."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from femixer.kernels.softmax.decays import Sums, between
from femixer.kernels.streams import transparent

# A mask is made for as many rows at a time as keep it below this size: on a CPU it should stay in the cache.
MASK_ELEMENTS = {"cpu": 2**22}
MANY_MASK_ELEMENTS = 2**25
# One of decays is a float per head and pair.
DECAY_ELEMENTS = 13 * 2**20
# Making a mask of decays, and its gradient, takes about this many of its size.
DECAY_COPIES = 4
# Off the CPU a window takes about this many calls.
WINDOW_PIECES = 4


class Visibility(NamedTuple):
    """Who sees whom, apart from the score. Queries are the last T of the S tokens if causal.

    bias [B, H, T, S] is added to the scores; or, as [B, H, 2 S], the decays of which it has the sums. A query sees the
    keys of its own segment (segments of queries [B, T] and of keys [B, S], integers; negative is padding), and those
    less than `window` real tokens away.
    """

    bias: Tensor | None
    segments_q: Tensor | None
    segments_k: Tensor | None
    causal: bool
    window: int | None

    @property
    def decays(self) -> bool:
        return self.bias is not None and self.bias.dim() == 3

    def ahead(self, rows: slice, keys: slice, index: Tensor) -> Tensor | None:
        """Of decays, which keys lie after a query: bool [rows, keys], where those are seen. rows: of all tokens."""
        return None if self.causal else index[keys] > index[rows, None]

    def needs_no_mask(self, keys: int) -> bool:
        """Apart from causality, every query sees all `keys`."""
        return self.bias is None and self.segments_q is None and (self.window is None or self.window >= keys)

    def padding(self) -> Tensor | None:
        """Queries that are padding, bool [B, T, 1, 1]."""
        return None if self.segments_q is None else (self.segments_q < 0)[..., None, None]


# One attention call: these rows over these keys, under a float mask, the triangular one, or none. A plain tuple, and
# never from a generator: in anything else a compiler takes the lengths in the slices for constants.
Piece = tuple[slice, slice, Tensor | None, bool]


def pieces(q: Tensor, k: Tensor, seen: Visibility, last_first: bool = False) -> Iterator[Piece]:
    """For q [B, T, H, E] and k [B, S, G, E]; masks are made one after the other, and may overwrite each other."""
    t, s = q.shape[1], k.shape[1]
    if seen.needs_no_mask(s) and (not seen.causal or t == 1 or t == s):
        return iter([(slice(0, t), slice(0, s), None, seen.causal and bool(t > 1))])
    alone = seen.decays and seen.causal and seen.window is None and seen.segments_q is None
    if alone and q.device.type != "cpu" and not transparent(q):
        return _decayed(q, s, seen, last_first)
    index = torch.arange(s, device=q.device)
    rank = index[None] if seen.segments_k is None else (seen.segments_k >= 0).cumsum(1)
    near = seen.window if seen.segments_k is None else None  # keys by their place alone
    zero, step = q.new_zeros(()), _rows_together(q, s, seen)
    sums = Sums.of(seen.bias).split(q.dtype) if seen.bias is not None and seen.decays else None

    def piece(start: int) -> Piece:
        rows = slice(start, min(start + step, t))
        first, last = start + s - t, rows.stop + s - t
        low, high = 0, last if seen.causal else s
        if near is not None:
            low, high = max(0, first - near + 1), min(high, last + near - 1)
        keys = slice(low, high)
        hidden = _hidden(rows, keys, s - t, index, rank, seen)
        mask = zero
        if sums is not None:
            mask = between(sums.at(slice(first, last)), sums.at(keys), seen.ahead(slice(first, last), keys, index))
        elif seen.bias is not None:
            mask = seen.bias[:, :, rows, keys].to(q.dtype)
        if hidden is not None:
            own = sums is not None and not torch._C._are_functorch_transforms_active()
            mask = (mask.masked_fill_ if own else mask.masked_fill)(hidden[:, None], -torch.inf)
        return rows, keys, mask, False

    return map(piece, (0,) if torch.compiler.is_compiling() else range(0, t, step))


def _decayed(q: Tensor, keys: int, seen: Visibility, last_first: bool) -> Iterator[Piece]:
    """Rows over the keys before them, whose scores decay: as many rows at a time as have DECAY_ELEMENTS pairs, so that
    the first ones are more. All masks are made in one place."""
    assert seen.bias is not None
    until, before, many = Sums.of(seen.bias).until, keys - q.shape[1], DECAY_ELEMENTS // max(1, q.shape[0] * q.shape[2])
    stops = [0]
    while stops[-1] < q.shape[1]:
        known = before + stops[-1]
        rows = (math.isqrt(known * known + 4 * many) - known) // 2  # rows (known + rows) <= many
        stops.append(min(stops[-1] + max(64, rows // 8 * 8), q.shape[1]))
    found = list(pairwise(stops))
    shapes = [(*until.shape[:2], stop - start, before + stop) for start, stop in found]
    place = q.new_empty(max(map(math.prod, shapes)))
    future = torch.ones(stops[1], stops[1], dtype=torch.bool, device=q.device).triu(1)

    def piece(number: int) -> Piece:
        (start, stop), shape = found[number], shapes[number]
        mask = place[: math.prod(shape)].view(shape)
        rows = until[..., before + start : before + stop, None]
        torch.sub(rows, until[..., None, : before + stop], out=mask)
        mask[..., before + start :].masked_fill_(future[: stop - start, : stop - start], -torch.inf)
        return slice(start, stop), slice(0, before + stop), mask, False

    numbers = range(len(found))
    return map(piece, reversed(numbers) if last_first else numbers)


def _rows_together(q: Tensor, keys: int, seen: Visibility) -> int:
    if torch.compiler.is_compiling():
        return q.shape[1]  # as many calls for any length
    masks = 1
    if seen.bias is not None:
        masks = q.shape[0] * q.shape[2]
    elif seen.segments_q is not None:
        masks = q.shape[0]
    elements = MASK_ELEMENTS.get(q.device.type, MANY_MASK_ELEMENTS)
    if seen.decays and q.device.type == "cpu":
        elements //= DECAY_COPIES
    step = max(64, elements // max(1, keys * masks))
    if seen.window is not None and seen.segments_q is None:
        # Keys out of sight are left out, more of them the fewer rows go together.
        least = 128 if q.device.type == "cpu" else -(-q.shape[1] // WINDOW_PIECES)
        step = min(step, max(least, seen.window))
    return step


def _hidden(rows: slice, keys: slice, offset: int, index: Tensor, rank: Tensor, seen: Visibility) -> Tensor | None:
    """bool [B or 1, rows, keys]; None where all is seen."""
    row = slice(rows.start + offset, rows.stop + offset)
    hidden = None
    if seen.causal:
        hidden = (index[keys] > index[row, None])[None]
    if seen.window is not None:
        far = (rank[:, row, None] - rank[:, None, keys]).abs() >= seen.window
        hidden = far if hidden is None else hidden | far
    if seen.segments_q is not None and seen.segments_k is not None:
        query, key = seen.segments_q[:, rows, None], seen.segments_k[:, None, keys]
        other = query != key
        hidden = other if hidden is None else hidden | other
        # A padding row has nothing to see; let it see everything, its result is thrown away.
        hidden = hidden & (query >= 0)
    return hidden
