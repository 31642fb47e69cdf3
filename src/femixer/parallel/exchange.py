"""What ranks send each other, with gradients: the only file here that talks to torch.distributed.

Each function is a pair: what the backward sends belongs to what the forward sent, so all ranks must call both. Ranks
that build the same graph do.
"""

from __future__ import annotations

from collections.abc import Sequence
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
