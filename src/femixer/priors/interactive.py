"""A channel-interactive (Mamba-style) prior: a distribution over pairs (i, k) of token and input channel of the head.

    s_{t,j}(i, k) = sum_n R[j, n] c_t[n] (a_{i+1} ... a_t)[n] b_i[n] W[n, k],   normalized per output channel j

Our interpretation of one sentence of the paper ("a channel-interactive variant lifts the index set to pairs (i, k) and
normalizes per output channel, enabling cross-channel competition"). All channels of a head compete for the same
exponentials exp(beta v_{i,k}), so a head has one temperature.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import inverse_softplus, spread_decay_
from femixer.kernels.operator import at_least
from femixer.kernels.pair_state_space import PairSums, PairSystem, pair_state_space_read
from femixer.kernels.reading import Reading
from femixer.kernels.softplus import softplus
from femixer.layout import Layout
from femixer.priors.base import DirectedPrior, Widths, decay_between
from femixer.priors.mamba import EPSILON
from femixer.projection import Columns


class InteractivePrior(DirectedPrior):
    """a = exp(-delta A) per head and mode, delta = softplus of a projection; b and c are softplus of projections shared
    by all heads; R and W are positive. Memory spans start spread from 2 to 1000 tokens over the heads."""

    queries_and_keys = False
    one_temperature = True
    shared_columns = ("b", "c")

    def __init__(
        self, heads: int, kv_heads: int, widths: Widths, *, causal: bool, state_size: int = 16, **factory_kwargs: Any
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **factory_kwargs)
        if not isinstance(state_size, int) or isinstance(state_size, bool) or state_size < 1:
            raise ValueError(f"state_size={state_size!r} must be a positive integer")
        self.state_size = state_size
        self.rate = nn.Parameter(torch.empty(heads, state_size, **factory_kwargs))
        self.delta_bias = nn.Parameter(torch.empty(heads, **factory_kwargs))
        self.write_map = nn.Parameter(torch.empty(heads, state_size, widths.value, **factory_kwargs))
        self.read_map = nn.Parameter(torch.empty(heads, widths.value, state_size, **factory_kwargs))
        self.reset_parameters()

    @classmethod
    def own_columns(cls, dim: int, heads: int, options: dict[str, Any]) -> tuple[float, float]:
        states = options.get("state_size", 16)
        return (heads + 2.0 * states if isinstance(states, int) else 0.0), 0.0

    def reset_parameters(self) -> None:
        with torch.no_grad():
            modes = torch.arange(1, self.state_size + 1, dtype=torch.float64)
            self.rate.copy_(inverse_softplus(modes).expand_as(self.rate))
        spread_decay_(self.delta_bias)
        # Modes and channels must start different: equal ones would stay equal.
        nn.init.normal_(self.write_map)
        nn.init.normal_(self.read_map)

    def columns(self) -> dict[str, Columns]:
        return {
            "b": Columns(self.state_size),
            "c": Columns(self.state_size),
            "delta": Columns(self.heads, additive=True),
        }

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        falls = softplus(inputs["delta"].to(dtype), self.delta_bias, scale=-1.0)  # -delta
        gate = falls[..., None] * softplus(at_least(self.rate, dtype))
        b, c = (softplus(inputs[name].to(dtype), floor=EPSILON) for name in ("b", "c"))
        return {"b": b, "c": c, "gate": gate}

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
        write_map, read_map = (softplus(at_least(x, v.dtype)) for x in (self.write_map, self.read_map))
        system = PairSystem(tracks["gate"], tracks["b"], tracks["c"], write_map, read_map)
        sums, top = PairSums.empty(system.gate) if state is None else state
        temperatures = None if beta is None else beta[:, 0]
        mean, free, log_total, *last = pair_state_space_read(*system, v, temperatures, marks, sums, top, exclusive)
        return Reading(mean, None if beta is None else free, log_total, PairSums(*last))

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        """[B, H, rows, T * D, D]: over pairs (i, k), for every output channel j."""
        dtype = tracks["b"].dtype
        write, read = (F.softplus(x.to(dtype)).log() for x in (self.write_map, self.read_map))
        between = decay_between(tracks["gate"], rows).permute(0, 3, 1, 2, 4)  # [B, H, rows, T, N]
        terms = between + tracks["c"][:, None, rows, None].log() + tracks["b"][:, None, None].log()
        scores = (
            terms[..., n, None, None]
            + write[:, n, :, None][None, :, None, None]
            + read[:, None, :, n][None, :, None, None]
            for n in range(self.state_size)
        )
        return reduce(torch.logaddexp, scores).flatten(3, 4)

    def visible(self, layout: Layout, rows: Tensor) -> Tensor:
        return super().visible(layout, rows).repeat_interleave(self.widths.value, 2)

    def over_index(self, v: Tensor) -> Tensor:
        return v.permute(0, 1, 3, 2).flatten(1, 2)[..., None].expand(-1, -1, -1, v.shape[-1])

    def over_tokens(self, p: Tensor) -> Tensor:
        return p.unflatten(3, (-1, self.widths.value)).sum(4)
