"""The interface of a prior: a distribution p_t over positions, made from projections of the tokens.

A prior answers two questions and nothing else in the code base knows how p_t is made: `read` gives mean and free energy
of the values under p_t, fast; `weights` gives p_t itself, dense, for tests and inspection.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.gates import gated_read
from femixer.layout import Layout
from femixer.projection import Columns


class Widths(NamedTuple):
    """Per head: `key` channels for queries and keys (0 where the prior has none), `value` channels for the values."""

    key: int
    value: int


class Prior(nn.Module):
    """Base of all priors. Subclasses are one file in this folder and one line in the registry.

    Keyword-only parameters of a subclass's __init__ beyond those here are its options.
    """

    queries_and_keys = True  # has columns "q" and "k" (so it takes rope and kv_heads)
    one_temperature = False  # all channels of a head share one, because they compete
    shared_columns: tuple[str, ...] = ()  # that all heads read; the others are the heads', in order and in equal parts
    shared_parameters: tuple[str, ...] = ()  # that all heads read; the others have the heads first
    reads_on = False  # from a state of constant size, as fast as the whole sequence at once

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.widths, self.causal = heads, kv_heads, widths, causal

    @classmethod
    def sized(cls, dim: int, options: dict[str, Any]) -> dict[str, Any]:
        """The options, completed by those whose default depends on dim."""
        return options

    @classmethod
    def own_columns(cls, dim: int, heads: int, options: dict[str, Any]) -> tuple[float, float]:
        """Without queries and keys: the columns of dim that the prior has, some in all and some per value channel.

        Parameters per channel alone (rates, weights of a state) do not grow with dim and are not counted.
        """
        return 0.0, 0.0

    def columns(self) -> dict[str, Columns]:
        """What the prior wants projected from the tokens, by name."""
        raise TypeError(f"{type(self).__name__} must define columns()")

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        """-> (E_p[v], log E_p[exp(beta v)] / beta, next state), each read [B, T, H, D].

        inputs: the projections [B, T, width]; v [B, T, G, D] with G key/value heads; beta [G, D], None for the mean
        only; state of the tokens before; keep: whether a next state is wanted.
        """
        raise TypeError(f"{type(self).__name__} must define read()")

    def gated_read(
        self,
        inputs: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        lam: Tensor | None,
        gate: Tensor | None,
        layout: Layout,
        state: Any,
        keep: bool,
    ) -> tuple[Tensor, Any]:
        """`read`, then the gates of logits lam and gate [B, T, H, D] -> (o [B, T, H, D], next state). A prior may do
        both at once."""
        mean, free, memory = self.read(inputs, v, beta, layout, state, keep)
        return gated_read(mean, free, lam, gate), memory

    def forward(
        self,
        inputs: dict[str, Tensor],
        v: Tensor,
        beta: Tensor | None,
        lam: Tensor | None,
        gate: Tensor | None,
        layout: Layout,
        state: Any,
        keep: bool,
    ) -> tuple[Tensor, Any]:
        """The gated read: what the mixer calls, as a module, so that whoever owns its parameters is asked for them."""
        return self.gated_read(inputs, v, beta, lam, gate, layout, state, keep)

    def weights(
        self,
        inputs: dict[str, Tensor],
        layout: Layout,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """p [B or 1, H, rows, T], or [.., T, D] where it differs per channel; rows: which queries (all).

        A prior over pairs of token and channel has T * D entries instead of T (see `over_index` and `over_tokens`).
        """
        raise TypeError(f"{type(self).__name__} must define weights()")

    def over_index(self, v: Tensor) -> Tensor:
        """The values [B, T, G, D] as what `weights` distributes over: [B, index, G, D]."""
        return v

    def over_tokens(self, p: Tensor) -> Tensor:
        """Weights over the index as weights over tokens."""
        return p
