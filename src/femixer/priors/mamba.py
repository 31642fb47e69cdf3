"""An input-dependent (Mamba-style) state space with positive parameters as prior, per channel.

p_t(i) proportional to  sum_n c_t[n] exp(A[n] (delta_{i+1} + ... + delta_t)) b_i[n] delta_i  (+ D if i = t),   A < 0
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import inverse_softplus, spread_decay_
from femixer.kernels.operator import at_least
from femixer.kernels.reading import Reading
from femixer.kernels.softplus import softplus
from femixer.kernels.state_space import System
from femixer.kernels.two_reads import two_reads
from femixer.layout import Layout
from femixer.priors.base import Widths, decay_between
from femixer.priors.ssm import StateSpacePrior
from femixer.projection import Columns

# Keeps delta, b and c positive where softplus underflows.
EPSILON = 1e-6


class MambaPrior(StateSpacePrior):
    """delta, b and c are softplus of projections (delta through a low-rank map); all channels share b and c.

    normalize=False reads with the unnormalized weights (the paper's ablation "- p_t norm"). skip=True adds Mamba's D: a
    positive weight of the token itself, one per channel, initially 1. The slowest mode starts with memory spans spread
    from 2 to 1000 tokens in every head; mode n decays n times as fast.
    """

    shared_columns = ("b", "c", "delta")

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        state_size: int = 16,
        normalize: bool = True,
        rank: int | None = None,
        skip: bool = False,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, state_size=state_size, **factory_kwargs)
        for name, value in (("normalize", normalize), ("skip", skip)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be True or False")
        self.normalize = normalize
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"rank={rank!r} must be a positive integer, or None for dim / 16")
        self.rank = rank
        self.rate = nn.Parameter(torch.empty(heads, widths.value, state_size, **factory_kwargs))
        self.delta_map = nn.Parameter(torch.empty(heads * widths.value, self.rank, **factory_kwargs))
        self.delta_bias = nn.Parameter(torch.empty(heads, widths.value, **factory_kwargs))
        self.skip = nn.Parameter(torch.empty(heads, widths.value, **factory_kwargs)) if skip else None
        self.reset_parameters()

    @classmethod
    def sized(cls, dim: int, options: dict[str, Any]) -> dict[str, Any]:
        return options if options.get("rank") is not None else {**options, "rank": max(1, dim // 16)}

    @classmethod
    def own_columns(cls, dim: int, heads: int, options: dict[str, Any]) -> tuple[float, float]:
        rank, states = options["rank"], options.get("state_size", 16)
        if not isinstance(states, int) or not isinstance(rank, int) or states < 1 or rank < 1:
            return 0.0, 0.0  # building the prior raises the error
        return rank + 2.0 * states, rank / dim

    def reset_parameters(self) -> None:
        with torch.no_grad():
            modes = torch.arange(1, self.state_size + 1, dtype=torch.float64)
            self.rate.copy_(inverse_softplus(modes).expand_as(self.rate))
        nn.init.normal_(self.delta_map, std=self.rank**-0.5)
        for row in self.delta_bias:
            spread_decay_(row)
        if self.skip is not None:
            nn.init.constant_(self.skip, math.log(math.expm1(1.0)))

    def columns(self) -> dict[str, Columns]:
        return {
            "b": Columns(self.state_size),
            "c": Columns(self.state_size),
            "delta": Columns(self.rank, additive=True),
        }

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        logits = F.linear(inputs["delta"].to(dtype), self.delta_map.to(dtype))
        return {
            "delta": softplus(logits, self.delta_bias.flatten(), floor=EPSILON),
            "b": softplus(inputs["b"].to(dtype), floor=EPSILON),
            "c": softplus(inputs["c"].to(dtype), floor=EPSILON),
        }

    def system(self, tracks: dict[str, Tensor], dtype: torch.dtype) -> System:
        rate = self.modes_first(softplus(at_least(self.rate, dtype), scale=-1.0))
        return System(rate, step=tracks["delta"], write=tracks["b"], read=tracks["c"])

    def scan(
        self,
        tracks: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        marks: Tensor | None,
        state: Any,
        keep: bool,
        exclusive: bool,
    ) -> Reading:
        read = super().scan(tracks, v, beta, marks, state, keep, exclusive)
        if self.skip is None or exclusive:
            return read
        return with_itself(read, v.to(read.mean.dtype), beta, softplus(at_least(self.skip, v.dtype)).log())

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        delta = tracks["delta"].unflatten(-1, (self.heads, self.widths.value))  # [B, T, H, D]
        between = decay_between(delta, rows)  # [B, rows, T, H, D]
        rate = F.softplus(self.rate.to(delta.dtype))
        terms = (
            tracks["c"][:, rows, n].log()[:, :, None, None, None]
            + tracks["b"][:, :, n].log()[:, None, :, None, None]
            - rate[..., n] * between
            for n in range(self.state_size)
        )
        scores = (reduce(torch.logaddexp, terms) + delta.log()[:, None]).permute(0, 3, 1, 2, 4)
        if self.skip is None:
            return scores
        itself = torch.arange(scores.shape[3], device=rows.device) == rows[:, None]
        more = torch.logaddexp(scores, F.softplus(self.skip.to(scores.dtype)).log()[:, None, None])
        return torch.where(itself[..., None], more, scores)


def with_itself(read: Reading, v: Tensor, beta: Tensor | None, log_weight: Tensor) -> Reading:
    """Add one entry to the reads [B, T, H, D]: each token's own value, with weight exp(log_weight) [H, D].

    The reads are never of nothing, because the weights of a state space are above zero.
    """
    own, weight = v.flip(1), log_weight.expand_as(v).flip(1)
    free = None if read.free is None else own
    mean, free, log_total = two_reads(*read[:3], own, free, weight, beta)
    return Reading(mean, None if beta is None else free, log_total, read.state)
