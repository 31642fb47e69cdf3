"""Decays between queries and keys: a bias of the scores that is made where it is needed and never held whole.

    bias_ti = gate_{i+1} + ... + gate_t  for i <= t,    gate_t + ... + gate_{i-1}  for i > t

A sum along the sequence grows without bound and its differences must not lose digits: sums are float64. Off a CPU
differences are, and are written in the float type of the scores. On a CPU, and where others see through, they are made
in that type, of the sums rounded to it and of what rounding leaves of them, which is as exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def gradients(grad: Tensor, ahead: Tensor | None) -> tuple[Sums, Sums]:
    """Of the sums of queries and keys, from that of the bias [..., T, S]."""
    wide: dict[str, Any] = {"dtype": torch.float64}
    past = grad if ahead is None else grad.masked_fill(ahead, 0)
    rows, columns = past.sum(-1, **wide), past.sum(-2, **wide)
    if ahead is None:
        return Sums(torch.zeros_like(rows), rows), Sums(torch.zeros_like(columns), -columns)
    later = grad.masked_fill(~ahead, 0)
    return Sums(-later.sum(-1, **wide), rows), Sums(later.sum(-2, **wide), -columns)


def add_(total: Tensor, part: Sums, tokens: Any) -> None:
    """To the gradient of sums [..., 2 S] that of the sums at some tokens."""
    before, until = Sums.of(total)
    before[..., tokens] += part.before
    until[..., tokens] += part.until
