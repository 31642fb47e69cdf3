"""A time-invariant state space with positive impulse response as prior: p_t(i) proportional to H(t - i)."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import inverse_softplus, memory_spans
from femixer.kernels.operator import at_least
from femixer.kernels.reading import Reading
from femixer.kernels.softplus import softplus
from femixer.kernels.state_space import Modes, System, state_space_read
from femixer.layout import Layout
from femixer.priors.base import DirectedPrior, Widths
from femixer.projection import Columns


class StateSpacePrior(DirectedPrior):
    """Scan of a diagonal state space with `state_size` modes per channel; a subclass defines the `system`."""

    queries_and_keys = False

    def __init__(
        self, heads: int, kv_heads: int, widths: Widths, *, causal: bool, state_size: int, **factory_kwargs: Any
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **factory_kwargs)
        if not isinstance(state_size, int) or isinstance(state_size, bool) or state_size < 1:
            raise ValueError(f"state_size={state_size!r} must be a positive integer")
        self.state_size = state_size

    def system(self, tracks: dict[str, Tensor], dtype: torch.dtype) -> System:
        raise TypeError(f"{type(self).__name__} must define system()")

    def modes_first(self, parameter: Tensor) -> Tensor:
        """[H, D, N] -> [N, C]"""
        return parameter.flatten(0, 1).mT

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
        system = self.system(tracks, v.dtype)
        flat, shape = v.flatten(-2), v.shape[-2:]
        temperatures = None if beta is None else beta.flatten()
        sums, top = Modes.empty(system.rate, flat) if state is None else state
        mean, free, log_total, *last = state_space_read(*system, flat, temperatures, marks, sums, top, exclusive)
        free_energy = None if beta is None else free.unflatten(-1, shape)
        return Reading(mean.unflatten(-1, shape), free_energy, log_total.unflatten(-1, shape), Modes(*last))


class SSMPrior(StateSpacePrior):
    """H(tau) = C A^(tau-1) B for tau >= 1 and D for tau = 0, with diagonal A in (0, 1) and everything positive.

    Only the products of C and B matter, so there is one parameter `response` = C B / A per mode, and
    H(tau) = sum_n response_n A_n^tau. Modes start with memory spans spread from 2 to 1000 tokens, each with the same
    total weight.
    """

    def __init__(
        self, heads: int, kv_heads: int, widths: Widths, *, causal: bool, state_size: int = 16, **factory_kwargs: Any
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, state_size=state_size, **factory_kwargs)
        shape = (heads, widths.value)
        self.rate = nn.Parameter(torch.empty(*shape, state_size, **factory_kwargs))
        self.response = nn.Parameter(torch.empty(*shape, state_size, **factory_kwargs))
        self.skip = nn.Parameter(torch.empty(shape, **factory_kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        raw = inverse_softplus(1 / memory_spans(self.state_size))
        with torch.no_grad():
            self.rate.copy_(raw.expand_as(self.rate))
            self.response.copy_(raw.expand_as(self.response))
        nn.init.zeros_(self.skip)

    def columns(self) -> dict[str, Columns]:
        return {}

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        # The prior depends only on distances, which count real tokens.
        real = layout.position.new_ones(layout.position.shape, dtype=dtype)
        if layout.padding is not None:
            real = real.masked_fill(layout.padding, 0)
        return {"real": real}

    def system(self, tracks: dict[str, Tensor], dtype: torch.dtype) -> System:
        rate, weight, skip = (at_least(x, dtype) for x in (self.rate, self.response, self.skip))
        rate, weight, skip = softplus(rate, scale=-1.0), softplus(weight), softplus(skip).flatten()
        return System(self.modes_first(rate), weight=self.modes_first(weight), skip=skip)

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        real = tracks["real"]
        count = real.cumsum(1)
        distance = (count[:, rows, None] - count[:, None]).abs()[..., None]  # [B, rows, T, 1]
        rate, weight, skip = (F.softplus(x.to(real.dtype)) for x in (self.rate, self.response, self.skip))
        # [B, H, rows, T, D], mode by mode
        terms = (
            weight[..., n].log()[None, :, None, None] - rate[..., n][None, :, None, None] * distance[:, None]
            for n in range(self.state_size)
        )
        scores = reduce(torch.logaddexp, terms)
        itself = torch.arange(real.shape[1], device=rows.device) == rows[:, None]
        return torch.where(itself[..., None], skip.log()[None, :, None, None], scores)
