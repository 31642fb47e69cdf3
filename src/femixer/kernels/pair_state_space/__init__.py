"""The read over pairs (i, k) of token and input channel of a head, weighed by a diagonal state space per head.

    weight of the pair (i, k) at t for output channel j:
        sum_n gather[j, n] read_t[n] exp(gate_{i+1}[n] + ... + gate_t[n]) write_i[n] spread[n, k],   gate <= 0

    mean = sum w v / sum w,   free = log(sum w exp(beta v) / sum w) / beta,   log_total = log sum w,   sums over i and k

Axes: B batch, T tokens, H heads, D channels of a head, N modes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import declared, wide_dtype
from femixer.kernels.reading import state_dtype
from femixer.kernels.state_space import dense_read, some_past


class PairSystem(NamedTuple):
    """gate [B, T, H, N] log decays; write, read [B, T, N]; spread [H, N, D] over input channels; gather [H, D, N]."""

    gate: Tensor
    write: Tensor
    read: Tensor
    spread: Tensor
    gather: Tensor


class PairSums(NamedTuple):
    """State: sums [B, 3, H, N] of 1, v and exp(beta v - top) over pairs, and top [B, H], in `state_dtype`.

    top is the largest exponent so far as it decays with the slowest mode, -inf before the first token.
    """

    sums: Tensor
    top: Tensor

    @classmethod
    def empty(cls, gate: Tensor) -> PairSums:
        batch, _, heads, modes = gate.shape
        dtype = state_dtype(gate.device)
        sums = gate.new_zeros(batch, 3, heads, modes, dtype=dtype)
        return cls(sums, gate.new_full((batch, heads), -torch.inf, dtype=dtype))


@declared(outputs=5)
def pair_state_space_read(
    gate: Tensor,
    write: Tensor,
    read: Tensor,
    spread: Tensor,
    gather: Tensor,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """mean, free (empty without beta) and log_total [B, T, H, D]; sums and top of the state after the last token.

    gate to gather: the PairSystem; v [B, T, H, D]; beta [H]: a head's channels compete, so they share one temperature;
    marks [B, T]; sums, top: the state before. exclusive: a token reads those before it, decayed by its own gate.
    """
    mean, log_total = (v.new_empty(v.shape, dtype=wide_dtype(v)) for _ in range(2))
    free = mean.new_empty((0, 0, 0, 0) if beta is None else v.shape)
    return mean, free, log_total, sums.new_empty(sums.shape), top.new_empty(top.shape)


OPERATOR = pair_state_space_read.operator


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """All weights, dense, in float64."""
    gate, write, read, spread, gather, v, beta, marks, sums, top, exclusive = arguments
    gate, write, read, spread, gather, v = (x.double() for x in (gate, write, read, spread, gather, v))
    batch, length = v.shape[:2]
    marks = torch.zeros(batch, length, dtype=torch.int8) if marks is None else marks
    top = top.detach()
    real = ~is_padding(marks)[..., None, None]
    segment = is_start(marks).cumsum(1)  # 0: goes on from the state
    gate, v, write = (torch.where(real if x.dim() == 4 else real[..., 0], x, 0) for x in (gate, v, write))
    gates = gate.cumsum(1)

    def decay(reach: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen[..., None, None], reach, -torch.inf).exp()

    index = torch.arange(length)
    past = index[:, None] > index if exclusive else index[:, None] >= index
    between = decay(gates[:, :, None] - gates[:, None], past & (segment[:, :, None] == segment[:, None]))
    weights = torch.einsum("hjn,btn,btihn,bin,hnk->btihjk", gather, read, between, write, spread)
    carried = torch.einsum("hjn,btn,bthn->bthjn", gather, read, decay(gates, segment == 0))
    # The state after the last token, through which its segment's tokens are seen.
    inside = decay(gates[:, -1:] - gates, segment == segment[:, -1:])
    written = torch.einsum("bihn,bin,hnk->bihnk", inside, write, spread)
    kept = decay(gates[:, -1], segment[:, -1] == 0)

    def read_of(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.einsum("btihjk,bihk->bthj", weights, x) + torch.einsum("bthjn,bhn->bthj", carried, state)
        return rows, torch.einsum("bihnk,bihk->bhn", written, x) + kept * state

    return dense_read(read_of, v, beta, marks, gate.amax(-1), sums, top)


def examples() -> dict[str, tuple[Any, ...]]:
    """All go on from a state, so that rows and their first tokens see more than one value."""
    torch.manual_seed(0)

    def case(
        length: int,
        *,
        marked: bool = False,
        exclusive: bool = False,
        warm: bool = True,
        scale: float = 1.0,
        pace: float = 1.0,
    ) -> tuple[Any, ...]:
        batch, heads, width, modes = 2, 3, 5, 4
        gate = -pace * torch.rand(batch, length, heads, modes) * torch.tensor([0.01, 0.1, 1.0, 3.0])
        write, read = torch.rand(2, batch, length, modes)
        spread, gather = torch.rand(heads, modes, width), torch.rand(heads, width, modes)
        v, beta = scale * torch.randn(batch, length, heads, width), 0.3 + torch.rand(heads)
        marks = torch.zeros(batch, length, dtype=torch.int8)
        marks[0, [0, length // 7, length // 2, length - 1]] = PADDING
        marks[1, [length // 5, length // 3, length // 2]] = START
        sums, top = some_past(batch, heads, modes, beta if warm else None, scale)
        given = (gate, write, read, spread, gather, v, beta if warm else None, marks if marked else None)
        return *given, sums, top, exclusive

    return {
        "causal": case(19),
        "marks": case(23, marked=True),
        "exclusive": case(17, marked=True, exclusive=True),
        "the mean alone": case(7, warm=False),
        "large values": case(19, marked=True, scale=100.0),
        "fast modes": case(19, pace=20.0),
        "one token": case(1),
    }
