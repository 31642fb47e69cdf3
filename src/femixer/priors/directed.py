"""Priors whose weights come from a scan along time: linear in the length, with a state of constant size.

The scan reads each token's past. In encoder mode a second scan in reversed time reads its future, without the token
itself, and the two reads are mixed by their total weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.marks import reversed_marks
from femixer.kernels.precision import at_least, handed_dtype, without_autocast
from femixer.kernels.reading import Reading
from femixer.kernels.two_reads import two_reads
from femixer.kernels.unnormalized import unnormalized
from femixer.layout import Layout
from femixer.priors.base import Prior
from femixer.state import usable


class DirectedPrior(Prior):
    """A subclass says what it derives from the projections per token (`tracks`), how it scans (`scan`) and what its
    weights are (`log_scores`)."""

    reads_on = True

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors [B, T, ...] that the scan needs besides the values."""
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
        """Read along dim 1. exclusive: a token reads only those before it, with its own gate applied."""
        raise TypeError(f"{type(self).__name__} must define scan()")

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        """log s_t(i) as if all were visible, [B, H, rows, T] or [B, H, rows, T, D]."""
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
            tracks = self.tracks(inputs, layout, dtype)
            past = self.scan(tracks, v, beta, layout.marks(), usable(state), keep, exclusive=False)
            mean, free, log_total, state = past
            if not self.causal:
                mirrored = {name: x.flip(1) for name, x in tracks.items()}
                marks = reversed_marks(layout.marks())
                future = self.scan(mirrored, v.flip(1), beta, marks, None, False, exclusive=True)
                per_head = None if beta is None else beta.repeat_interleave(mean.shape[2] // beta.shape[0], 0)
                mean, free, log_total = two_reads(past[:3], future[:3], per_head)
            if not self.normalize:
                if layout.padding is not None:
                    log_total = log_total.masked_fill(layout.padding[..., None, None], 0)
                mean, free = unnormalized(mean, free, log_total.expand_as(mean), beta)
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

    def visible(self, layout: Layout, rows: Tensor) -> Tensor:
        """bool [B or 1, rows, index]: what a row's query sees."""
        length = layout.position.shape[1]
        key = torch.arange(length, device=rows.device)
        seen = torch.ones(1, len(rows), length, dtype=torch.bool, device=rows.device)
        if layout.segment is not None:
            seen = (layout.segment[:, rows, None] == layout.segment[:, None]) & (layout.segment[:, rows, None] >= 0)
        return seen & (key <= rows[:, None]) if self.causal else seen


def decay_between(gate: Tensor, rows: Tensor) -> Tensor:
    """Sum of the gates [B, T, ...] between rows t and tokens i, [B, rows, T, ...]: of i+1..t, or of t..i-1 ahead."""
    until = gate.cumsum(1)
    before = until - gate
    key = torch.arange(gate.shape[1], device=gate.device)
    ahead = (key > rows[:, None]).view(1, len(rows), len(key), *[1] * (gate.dim() - 2))
    return torch.where(
        ahead, before[:, None] - before[:, rows][:, :, None], until[:, rows][:, :, None] - until[:, None]
    )
