"""How a sequence lies on the ranks of a group: each has the same number of stretches of the same length.

One stretch per rank, in order, or two, cut like a zigzag: of 2 n stretches rank r has r and 2 n - 1 - r. Causal softmax
attention costs a stretch as much as there are tokens before it, and these two together cost every rank the same.
Layers see a rank's stretches as sequences of their own: [B, 2 T, ...] is folded to [2 B, T, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from femixer.parallel.exchange import gathered, summed


@dataclass(frozen=True)
class Cut:
    """group: the ranks; zigzag: two stretches per rank instead of one; ring: keys and values of softmax attention go
    around instead of being gathered."""

    group: Any
    zigzag: bool = False
    ring: bool = False

    @property
    def ranks(self) -> int:
        return int(distributed.get_world_size(self.group))

    @property
    def stretches(self) -> int:
        """Of one rank."""
        return 2 if self.zigzag else 1

    @property
    def count(self) -> int:
        """Of all ranks."""
        return self.ranks * self.stretches

    def places_of(self, rank: int) -> list[int]:
        """The places of a rank's stretches in the sequence."""
        return [rank, self.count - 1 - rank] if self.zigzag else [rank]

    @property
    def places(self) -> list[int]:
        """Of this rank's stretches."""
        return self.places_of(distributed.get_rank(self.group))

    def check_length(self, length: int) -> None:
        if length % self.count:
            raise ValueError(
                f"{length} tokens cannot be cut into {self.count} equal stretches on {self.ranks} ranks; "
                f"allowed is a multiple of {self.count}"
            )

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [B, T, ...], [B, T / ranks, ...]."""
        self.check_length(x.shape[1])
        pieces = x.chunk(self.count, 1) if x.shape[1] else [x] * self.count
        return torch.cat([pieces[place] for place in self.places], 1)

    def whole(self, x: Tensor) -> Tensor:
        """The sequence [B, T, ...] of whose tokens each rank has x [B, T / ranks, ...]; with gradients."""
        return self.whole_of_folded(self.fold(x))

    def whole_of_folded(self, x: Tensor) -> Tensor:
        """The same from x [B stretches, T, ...]."""
        return self.in_order(gathered(x, self.group)).transpose(0, 1).flatten(1, 2).contiguous()

    def fold(self, x: Tensor) -> Tensor:
        """x [B, stretches T, ...] -> [B stretches, T, ...]"""
        return x if self.stretches == 1 else x.unflatten(1, (self.stretches, -1)).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        return x if self.stretches == 1 else x.unflatten(0, (-1, self.stretches)).flatten(1, 2)

    def in_order(self, x: Tensor) -> Tensor:
        """What all ranks have of their stretches, x [ranks, B stretches, ...], by their places: [count, B, ...]."""
        if self.stretches == 1:
            return x
        held = [place for rank in range(self.ranks) for place in self.places_of(rank)]
        x = x.unflatten(1, (-1, self.stretches)).transpose(1, 2).flatten(0, 1)
        return x[torch.tensor(held, device=x.device).argsort()]

    def one_of_folded(self, x: Tensor, number: int) -> Tensor:
        """The rows [B, ...] of one of this rank's stretches, of x [B stretches, ...]."""
        return x if self.stretches == 1 else x[number :: self.stretches]

    def of_stretches(self, x: list[Tensor]) -> Tensor:
        """One tensor [B, ...] for each of this rank's stretches, as the folded batch [B stretches, ...]."""
        return x[0] if self.stretches == 1 else torch.stack(x, 1).flatten(0, 1)


def whole_sequence(model: Any, x: Tensor) -> Tensor:
    """Of a parallelized model, what it computed for all tokens, [B, T, ...], from this rank's x [B, T / ranks, ...]."""
    cut: Cut | None = getattr(model, "cut", None)
    return x if cut is None else cut.whole(x)


def own_tokens(model: Any, x: Tensor) -> Tensor:
    """Of a parallelized model, this rank's tokens [B, T / ranks, ...] of x [B, T, ...]."""
    cut: Cut | None = getattr(model, "cut", None)
    return x if cut is None else cut.take(x)


def summed_over_cut(model: Any, x: Tensor) -> Tensor:
    """Of a parallelized model, the sum over the whole sequence of what x is the sum of over this rank's tokens."""
    cut: Cut | None = getattr(model, "cut", None)
    return x if cut is None else summed(x, cut.group)
