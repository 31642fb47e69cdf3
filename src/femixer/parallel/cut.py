"""How a sequence lies on the ranks of a group, and what ranks send each other, with gradients.

Each rank has the same number of stretches of the same length. Only this file here talks to torch.distributed; each of
its functions is a pair: what the backward sends belongs to what the forward sent, so all ranks must call both. Ranks
that build the same graph do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

# Named anew in torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def gathered(x: Tensor, group: Any) -> Tensor:
    """x of all ranks, [ranks, *x.shape]. Its gradient is the sum of all ranks' gradients of this rank's x."""
    return _Gathered.apply(x, group)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of x over the ranks. Every rank's x has the gradient of the sum: all ranks go on with the same sum and
    arrive at the same gradient."""
    return _Summed.apply(x, group)


def shared(x: Tensor, group: Any) -> Tensor:
    """x itself, which all ranks hold, before each goes on with it in its own way: its gradient is the sum of theirs."""
    return _Shared.apply(x, group)


class Passing:
    """Tensors on their way around a ring: this rank's go to the next rank, those of the one before arrive. Without
    gradients; every rank passes on tensors of the same shapes."""

    def __init__(self, tensors: Sequence[Tensor], group: Any) -> None:
        ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
        after, before = (distributed.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self.sent = [x.contiguous() for x in tensors]  # held until they have arrived
        self.received = [torch.empty_like(x) for x in self.sent]
        give = [distributed.P2POp(distributed.isend, x, after, group) for x in self.sent]
        take = [distributed.P2POp(distributed.irecv, x, before, group) for x in self.received]
        self.works = distributed.batch_isend_irecv([*give, *take])

    def arrived(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        flat = x.new_empty(distributed.get_world_size(group) * x.numel())
        _all_gather(flat, x.contiguous().view(-1), group=group)
        return flat.view(-1, *x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(ctx.shape.numel())
        _reduce_scatter(own, grad.contiguous().view(-1), group=ctx.group)
        return own.view(ctx.shape), None


def _sum(x: Tensor, group: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


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
