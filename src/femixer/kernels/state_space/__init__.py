"""The state-space read: mean and free energy under positive weights that diagonal state spaces give, per channel.

    weight of token i at t:  sum_n read_t[n] exp(rate[n] (step_{i+1} + ... + step_t)) write_i[n] step_i,   rate <= 0

    mean = sum_i w_i v_i / sum_i w_i,   free = log(sum_i w_i exp(beta v_i) / sum_i w_i) / beta
    log_total = log sum_i w_i

Axes: B batch, T tokens, C channels, N modes per channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import declared, wide_dtype
from femixer.kernels.reading import state_dtype


class System(NamedTuple):
    """rate [N, C] log decays per unit of step; step [B, T, C] >= 0 and write [B, T, N] >= 0, None for ones.

    Modes are read with read [B, T, N] (Mamba), or with one weight [N, C] (a time-invariant state space). With skip [C]
    a token reads itself with that weight instead of through the state.
    """

    rate: Tensor
    step: Tensor | None = None
    write: Tensor | None = None
    read: Tensor | None = None
    weight: Tensor | None = None
    skip: Tensor | None = None


class Modes(NamedTuple):
    """State: sums [B, 3, N, C] of 1, v and exp(beta v - top) per mode, and top [B, C], in `state_dtype`.

    top is the largest exponent so far as it decays with the slowest mode, -inf before the first token.
    """

    sums: Tensor
    top: Tensor

    @classmethod
    def empty(cls, rate: Tensor, v: Tensor) -> Modes:
        dtype = state_dtype(v.device)
        sums = v.new_zeros(v.shape[0], 3, *rate.shape, dtype=dtype)
        return cls(sums, v.new_full((v.shape[0], v.shape[2]), -torch.inf, dtype=dtype))


@declared(outputs=5)
def state_space_read(
    rate: Tensor,
    step: Tensor | None,
    write: Tensor | None,
    read: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor,
    top: Tensor,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """mean, free (empty without beta) and log_total [B, T, C]; sums and top of the state after the last token.

    rate to skip: the System; v [B, T, C]; beta [C]; marks [B, T]; sums, top: the state before. exclusive: a token reads
    those before it, decayed by its own step.
    """
    mean, log_total = (v.new_empty(v.shape, dtype=wide_dtype(v)) for _ in range(2))
    free = mean.new_empty((0, 0, 0) if beta is None else v.shape)
    return mean, free, log_total, sums.new_empty(sums.shape), top.new_empty(top.shape)


OPERATOR = state_space_read.operator


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """All weights, dense, in float64."""
    rate, step, write, read, weight, skip, v, beta, marks, sums, top, exclusive = arguments
    batch, length, _ = v.shape
    modes = rate.shape[0]
    rate, v, sums, top = rate.double(), v.double(), sums.double(), top.detach()
    marks = torch.zeros(batch, length, dtype=torch.int8) if marks is None else marks
    real = ~is_padding(marks)
    segment = is_start(marks).cumsum(1)  # 0: goes on from the state
    step = torch.ones_like(v) if step is None else step.double()
    step, v = (torch.where(real[..., None], x, 0) for x in (step, v))
    write = v.new_ones(batch, length, modes) if write is None else write.double()
    write = torch.where(real[..., None], write, 0)
    # The weight [B, T, N, C] with which a row reads the modes.
    if read is not None:
        query = read.double()[..., None].expand(-1, -1, -1, v.shape[2])
    else:
        assert weight is not None
        query = weight.double().expand(batch, length, -1, -1)

    steps = step.cumsum(1)
    between = steps[:, :, None] - steps[:, None]  # [B, t, i, C]
    index = torch.arange(length)
    through_state = not exclusive and skip is None
    past = index[:, None] >= index if through_state else index[:, None] > index
    seen = past & (segment[:, :, None] == segment[:, None])
    decays = torch.where(seen[..., None, None], rate * between[:, :, :, None], -torch.inf).exp()
    weights = torch.einsum("btnc,btinc,bin,bic->btic", query, decays, write, step)
    if skip is not None and not exclusive:
        weights = weights + torch.diag_embed((skip.double() * step).mT).permute(0, 2, 3, 1)
    goes_on = (segment == 0)[..., None, None]
    carried = query * torch.where(goes_on, rate * steps[:, :, None], -torch.inf).exp()

    # The state after the last token, through which its segment's tokens are seen.
    inside = (segment == segment[:, -1:])[..., None, None]
    left = torch.where(inside, rate * (steps[:, -1:] - steps)[:, :, None], -torch.inf).exp()
    written = left * write[..., None] * step[:, :, None]
    kept = torch.where(goes_on[:, -1], rate * steps[:, -1, None], -torch.inf).exp()

    def read_of(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, state = x[..., 0], state.mT
        rows = torch.einsum("btic,bic->btc", weights, x) + torch.einsum("btnc,bnc->btc", carried, state)
        return rows[..., None], ((written * x[:, :, None]).sum(1) + kept * state).mT

    mean, free, log_total, last, last_top = dense_read(
        read_of, v[..., None], beta, marks, step * rate.amax(0), sums.mT, top
    )
    return mean.flatten(2), free.flatten(2), log_total.flatten(2), last.mT, last_top


def dense_read(
    read_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor,
    slowest: Tensor,
    sums: Tensor,
    top: Tensor,
) -> tuple[Tensor, ...]:
    """Mean, free energy, log total and the next state of values [B, T, H, D] in float64; beta [H].

    read_of gives, of a stream [B, T, H, D] and its state [B, H, N], the sums that rows read and those of the state
    after the last token. slowest [B, T, H]: log decays of the slowest mode; sums [B, 3, H, N], top [B, H].
    """
    real = ~is_padding(marks)[..., None, None]
    total, last_total = read_of(torch.ones_like(v), sums[:, 0])
    weighted, last_weighted = read_of(v, sums[:, 1])
    there = ~(total <= 0) & real
    safe = torch.where(there, total, 1)
    mean, log_total = torch.where(there, weighted / safe, 0), torch.where(there, safe.log(), -torch.inf)
    log_total = torch.where(real, log_total, 0)
    if beta is None:
        last = torch.stack([last_total, last_weighted, torch.zeros_like(last_total)], 1)
        return mean, v.new_empty(0, 0, 0, 0), log_total, last, top
    exponent = beta.double()[:, None] * v
    # Relative to one number per head, which any range of float64 allows.
    shift = torch.cat([exponent.amax(-1), top[:, None]], 1).amax(1).detach()
    before = sums[:, 2] * (top - shift).exp()[..., None]
    energy, last_energy = read_of((exponent - shift[:, None, :, None]).exp(), before)
    log_mean = torch.where(there, energy / safe, 1).log() + shift[:, None, :, None]
    free = torch.where(there, log_mean / beta.double()[:, None], 0)
    for at, highest, decay in zip(
        marks.unbind(1), exponent.detach().amax(-1).unbind(1), slowest.unbind(1), strict=True
    ):
        fallen = torch.where(is_start(at)[:, None], -torch.inf, top + decay.detach())
        top = torch.where(is_padding(at)[:, None], top, torch.maximum(fallen, highest))
    last_energy = last_energy * torch.where(top > -torch.inf, shift - top, 0).exp()[..., None]
    return mean, free, log_total, torch.stack([last_total, last_weighted, last_energy], 1), top


def some_past(batch: int, heads: int, modes: int, beta: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Sums [B, 3, H, N] and top [B, H] after a few tokens that are all read alike; beta [H]."""
    past, amounts = scale * torch.randn(batch, 7, heads, 1), torch.rand(batch, 7, heads, modes)
    top = torch.full((batch, heads), -torch.inf, dtype=torch.float64)
    streams = [torch.ones_like(past), past, torch.zeros_like(past)]
    if beta is not None:
        exponent = beta[:, None] * past
        top = exponent.amax((1, 3)).double()
        streams[2] = (exponent - top[:, None, :, None]).exp()
    return torch.stack([(amounts * x).sum(1) for x in streams], 1).double(), top


def examples() -> dict[str, tuple[Any, ...]]:
    """All go on from a state: without one the first token's free energy is its mean, on either side of a maximum."""
    torch.manual_seed(0)

    def case(
        length: int,
        *,
        mamba: bool,
        marked: bool = False,
        exclusive: bool = False,
        warm: bool = True,
        scale: float = 1.0,
        pace: float = 1.0,
    ) -> tuple[Any, ...]:
        batch, channels, modes = 2, 5, 3
        rate = -torch.rand(modes, channels) * torch.tensor([0.01, 0.3, 3.0])[:, None]
        system = (rate, pace * torch.rand(batch, length, channels), *torch.rand(2, batch, length, modes), None, None)
        if not mamba:
            system = (pace * rate, None, None, None, torch.rand(modes, channels), torch.rand(channels))
        v, beta = scale * torch.randn(batch, length, channels), 0.3 + torch.rand(channels)
        marks = torch.zeros(batch, length, dtype=torch.int8)
        marks[0, [0, length // 7, length // 2, length - 1]] = PADDING
        marks[1, [length // 5, length // 3, length // 2]] = START
        sums, top = some_past(batch, channels, modes, beta if warm else None, scale)
        return *system, v, beta if warm else None, marks if marked else None, sums.mT, top, exclusive

    return {
        "mamba": case(37, mamba=True),
        "mamba, marks": case(53, mamba=True, marked=True),
        "mamba, exclusive": case(19, mamba=True, marked=True, exclusive=True),
        "mamba, the mean alone": case(17, mamba=True, warm=False),
        "mamba, large values": case(41, mamba=True, marked=True, scale=100.0),
        "mamba, fast modes": case(37, mamba=True, pace=20.0),
        "mamba, one token": case(1, mamba=True),
        "ssm": case(37, mamba=False),
        "ssm, whole chunks": case(32, mamba=False),
        "ssm, marks": case(53, mamba=False, marked=True),
        "ssm, exclusive": case(19, mamba=False, marked=True, exclusive=True),
        "ssm, the mean alone": case(7, mamba=False, warm=False),
        "ssm, large values": case(41, mamba=False, scale=100.0),
        "ssm, one token": case(1, mamba=False),
    }
