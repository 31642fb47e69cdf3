"""Who sees whom, and the attention calls that it takes where a mask is needed.

Decays between queries and keys are a bias of the scores that is made where it is needed and never held whole:

    bias_ti = gate_{i+1} + ... + gate_t  for i <= t,    gate_t + ... + gate_{i-1}  for i > t

A sum along the sequence grows without bound and its differences must not lose digits: sums are float64. Differences are
made in the float type of the scores, of the sums rounded to it and of what rounding leaves of them, which is as exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A mask is made for as many rows at a time as keep it below this size: on a CPU it should stay in the cache.
MASK_ELEMENTS = {"cpu": 2**22}
MANY_MASK_ELEMENTS = 2**25
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


def pieces(q: Tensor, k: Tensor, seen: Visibility) -> Iterator[Piece]:
    """For q [B, T, H, E] and k [B, S, G, E]; masks are made one after the other."""
    t, s = q.shape[1], k.shape[1]
    if seen.needs_no_mask(s) and (not seen.causal or t == 1 or t == s):
        return iter([(slice(0, t), slice(0, s), None, seen.causal and bool(t > 1))])
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
    step = max(64, elements // (keys * masks))
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


class Sums(NamedTuple):
    """Sums of the gates before some tokens and up to them, [..., tokens] each."""

    before: Tensor
    until: Tensor

    @classmethod
    def of(cls, sums: Tensor) -> Sums:
        """sums [..., 2 S]: before the tokens, then up to them."""
        before, until = sums.unflatten(-1, (2, -1)).unbind(-2)
        return cls(before, until)

    def at(self, tokens: Any) -> Sums:
        return Sums(self.before[..., tokens], self.until[..., tokens])

    def split(self, dtype: torch.dtype) -> Sums:
        """[2, ..., tokens] each: rounded to a float type, and what rounding leaves of them."""
        rounded = [x.to(dtype) for x in self]
        return Sums(*(torch.stack([y, (x - y).to(dtype)]) for x, y in zip(self, rounded, strict=True)))


def between(queries: Sums, keys: Sums, ahead: Tensor | None) -> Tensor:
    """[..., T, S] of `split` sums; ahead bool [T, S]: which keys come after a query, None where those are not seen."""
    past = _difference(queries.until[..., :, None], keys.until[..., None, :])
    if ahead is None:
        return past
    return torch.where(ahead, _difference(keys.before[..., None, :], queries.before[..., :, None]), past)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return (a[0] - b[0]).add_(a[1]).sub_(b[1])


def decay_gradients(grad: Tensor, ahead: Tensor | None) -> tuple[Sums, Sums]:
    """Of the sums of queries and keys, from that of the bias [..., T, S]."""
    wide: dict[str, Any] = {"dtype": torch.float64}
    past = grad if ahead is None else grad.masked_fill(ahead, 0)
    rows, columns = past.sum(-1, **wide), past.sum(-2, **wide)
    if ahead is None:
        return Sums(torch.zeros_like(rows), rows), Sums(torch.zeros_like(columns), -columns)
    later = grad.masked_fill(~ahead, 0)
    return Sums(-later.sum(-1, **wide), rows), Sums(later.sum(-2, **wide), -columns)


def add_decays_(total: Tensor, part: Sums, tokens: Any) -> None:
    """To the gradient of sums [..., 2 S] that of the sums at some tokens."""
    before, until = Sums.of(total)
    before[..., tokens] += part.before
    until[..., tokens] += part.until
