"""The interface of a prior: a distribution p_t over positions, computed from projections of the tokens.

A prior has two methods: `read` returns mean and free energy of the values under p_t, fast; `weights` returns p_t
itself, dense, for tests and inspection. No other code knows how p_t is computed. `DirectedPrior` implements both for
priors whose weights come from a scan along time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from femixer.gates import gated_read
from femixer.kernels.marks import reversed_marks
from femixer.kernels.operator import at_least, handed_dtype, without_autocast
from femixer.kernels.reading import Reading
from femixer.kernels.two_reads import two_reads
from femixer.kernels.unnormalized import unnormalized
from femixer.layout import Layout
from femixer.projection import Columns
from femixer.state import usable


class Widths(NamedTuple):
    """Channels per head: `key` of queries and keys (0 if the prior has none), `value` of the values."""

    key: int
    value: int


class ThreeReads(NamedTuple):
    """States of the three reads of a posterior mean: of v, beta v + asinh v and beta v - asinh v."""

    values: Any
    rising: Any
    falling: Any


class Prior(nn.Module):
    """Base of all priors. A subclass is one file in this folder and one line in the registry.

    Additional keyword-only parameters of a subclass's __init__ are its options.
    """

    queries_and_keys = True  # has columns "q" and "k", so it supports rope and kv_heads
    normalize = True  # weights sum to one
    one_temperature = False  # the channels of a head share a temperature, because they compete
    shared_columns: tuple[str, ...] = ()  # used by all heads; other columns are split evenly among the heads, in order
    shared_parameters: tuple[str, ...] = ()  # used by all heads; the first axis of other parameters is the head
    reads_on = False  # continues from a state of constant size as fast as it reads a whole sequence

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
        """The options, with defaults that depend on dim filled in."""
        return options

    @classmethod
    def own_columns(cls, dim: int, heads: int, options: dict[str, Any]) -> tuple[float, float]:
        """For priors without queries and keys: number of projected columns, (in total, per value channel).

        Parameters per channel (rates, weights of a state) do not grow with dim and are not counted.
        """
        return 0.0, 0.0

    def columns(self) -> dict[str, Columns]:
        """The projections of the tokens that the prior needs, by name."""
        raise TypeError(f"{type(self).__name__} must define columns()")

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        """-> (E_p[v], log E_p[exp(beta v)] / beta, next state), each read [B, T, H, D].

        inputs: the projections [B, T, width]; v [B, T, G, D] with G key/value heads; beta [G, D], or None to read the
        mean only; state: of the tokens before; keep: whether to return a next state.
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
        """`read` followed by the gates, with logits lam and gate [B, T, H, D] -> (o [B, T, H, D], next state). A prior
        may fuse the two."""
        mean, free, memory = self.read(inputs, v, beta, layout, state, keep)
        return gated_read(mean, free, lam, gate), memory

    def read_posterior(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """-> (E_p[v], E_q[v], next state), q proportional to p exp(beta v): the readout "posterior_mean".

        With a = asinh v, v = (e^a - e^-a) / 2 is a difference of positive numbers. The posterior mean of each comes
        from a difference of free energies, so it is as exact as those, at any range, and uses the same states:

            E_q[e^a] = exp(log E_p[exp(beta v + a)] - log E_p[exp(beta v)])

        In float64, because a float32 free energy of 1e4 has only three decimals.
        """
        wide = torch.promote_types(v.dtype, torch.float32)
        v, beta = v.double(), beta.double()
        one, energy, a = torch.ones_like(beta), beta * v, v.asinh()
        streams = v, energy + a, energy - a
        if self.queries_and_keys:  # all channels of a head share the weights, so one read suffices
            side_by_side = torch.cat(streams, -1), torch.cat([beta, one, one], -1)
            means, energies, state = self.read(inputs, *side_by_side, layout, state, keep)
            assert energies is not None
            mean, (free, rising, falling) = means.chunk(3, -1)[0], energies.chunk(3, -1)
        else:
            states = ThreeReads(None, None, None) if state is None else state
            given = zip(streams, (beta, one, one), states, strict=True)
            reads = [self.read(inputs, x, temperature, layout, each, keep) for x, temperature, each in given]
            mean, (free, rising, falling) = reads[0][0], [each for _, each, _ in reads if each is not None]
            state = ThreeReads(*(each for _, _, each in reads))
        total = free * beta.repeat_interleave(self.heads // self.kv_heads, 0)
        best = ((rising - total).exp() - (falling - total).exp()) / 2
        return mean.to(wide), best.to(wide), state

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
        readout: str = "free_energy",
    ) -> tuple[Tensor, Any]:
        """The gated read. The mixer calls the prior as a module, so that hooks (FSDP, offloading) see the call."""
        if readout == "free_energy" or beta is None:
            return self.gated_read(inputs, v, beta, lam, gate, layout, state, keep)
        mean, best, memory = self.read_posterior(inputs, v, beta, layout, state, keep)
        return gated_read(mean, best, lam, gate), memory

    def weights(
        self,
        inputs: dict[str, Tensor],
        layout: Layout,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """p [B or 1, H, rows, T], or [.., T, D] if it differs per channel. rows: indices of the queries; None: all.

        A prior over pairs of token and channel has T * D entries instead of T (see `over_index` and `over_tokens`).
        """
        raise TypeError(f"{type(self).__name__} must define weights()")

    def visible(self, layout: Layout, rows: Tensor) -> Tensor:
        """bool [B or 1, rows, index]: which entries a row may read."""
        length = layout.position.shape[1]
        key = torch.arange(length, device=rows.device)
        seen = torch.ones(1, len(rows), length, dtype=torch.bool, device=rows.device)
        if layout.segment is not None:
            seen = (layout.segment[:, rows, None] == layout.segment[:, None]) & (layout.segment[:, rows, None] >= 0)
        return seen & (key <= rows[:, None]) if self.causal else seen

    def over_index(self, v: Tensor) -> Tensor:
        """The values [B, T, G, D] arranged along the index of `weights`: [B, index, G, D]."""
        return v

    def over_tokens(self, p: Tensor) -> Tensor:
        """Sum weights over the index to weights over tokens."""
        return p


class DirectedPrior(Prior):
    """Weights from a scan along time: linear in the length, with a state of constant size. The scan reads each token's
    past. In encoder mode a second scan in reversed time reads its future, without the token itself, and the two reads
    are mixed by their total weights.

    A subclass defines what it derives from the projections of a token (`tracks`), its scan (`scan`) and its weights
    (`log_scores`).
    """

    reads_on = True

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        """Inputs of the scan other than the values, each [B, T, ...]."""
        raise TypeError(f"{type(self).__name__} must define tracks()")

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
        """Read along dim 1. exclusive: a token reads only earlier tokens, decayed also by its own gate."""
        raise TypeError(f"{type(self).__name__} must define scan()")

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        """log s_t(i) for all pairs, before masking: [B, H, rows, T] or [B, H, rows, T, D]."""
        raise TypeError(f"{type(self).__name__} must define log_scores()")

    def read(
        self, inputs: dict[str, Tensor], v: Tensor, beta: Tensor | None, layout: Layout, state: Any, keep: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        dtype = handed_dtype(v)
        v, beta = v.to(dtype), None if beta is None else at_least(beta, dtype)
        if v.shape[0] == 0 or v.shape[1] == 0:
            nothing = v.new_zeros(*v.shape[:2], self.heads, v.shape[3])
            return nothing, None if beta is None else nothing, state
        with without_autocast(v.device):
            tracks, marks = self.tracks(inputs, layout, dtype), layout.marks()
            state = None if state is None else usable(state)
            past = self.scan(tracks, v, beta, marks, state, keep, exclusive=False)
            mean, free, log_total, state = past
            if not self.causal:
                mirrored = {name: x.flip(1) for name, x in tracks.items()}
                future = self.scan(mirrored, v.flip(1), beta, reversed_marks(marks), None, False, exclusive=True)
                per_head = None if beta is None else beta.repeat_interleave(mean.shape[2] // beta.shape[0], 0)
                mean, free, log_total = two_reads(*past[:3], *future[:3], per_head)
            if not self.normalize:
                if layout.padding is not None:
                    log_total = log_total.masked_fill(layout.padding[..., None, None], 0)
                mean, free = unnormalized(mean, free, log_total.expand_as(mean), beta)
            free = None if beta is None else free
            if layout.padding is not None:
                padding = layout.padding[..., None, None]
                mean, free = mean.masked_fill(padding, 0), None if free is None else free.masked_fill(padding, 0)
        return mean, free, state

    def weights(
        self,
        inputs: dict[str, Tensor],
        layout: Layout,
        rows: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        with without_autocast(layout.position.device):
            tracks = self.tracks(inputs, layout, dtype)
            for name in ("gate", "delta"):
                if layout.padding is not None and name in tracks:
                    padding = layout.padding.view(*layout.padding.shape, *[1] * (tracks[name].dim() - 2))
                    tracks[name] = tracks[name].masked_fill(padding, 0)
            length = layout.position.shape[1]
            rows = torch.arange(length, device=layout.position.device) if rows is None else rows
            scores = self.log_scores(tracks, rows)
        seen = self.visible(layout, rows)[:, None]
        if scores.dim() == 5:
            seen = seen[..., None]
        scores = scores.masked_fill(~seen, -torch.inf)
        if not self.normalize:
            return scores.exp()
        return scores.softmax(3).masked_fill(~seen, 0)


def decay_between(gate: Tensor, rows: Tensor) -> Tensor:
    """Sum of the gates [B, T, ...] between rows t and tokens i -> [B, rows, T, ...]: i+1..t, or t..i-1 for i > t."""
    until = gate.cumsum(1)
    before = until - gate
    key = torch.arange(gate.shape[1], device=gate.device)
    ahead = (key > rows[:, None]).view(1, len(rows), len(key), *[1] * (gate.dim() - 2))
    return torch.where(
        ahead, before[:, None] - before[:, rows][:, :, None], until[:, rows][:, :, None] - until[:, None]
    )
