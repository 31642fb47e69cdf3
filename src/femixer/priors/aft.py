"""AFT, a linear RNN with softmax weights, as prior: p_t(i) proportional to exp(k_i), per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.channel_scan import channel_scan
from femixer.kernels.reading import Reading
from femixer.layout import Layout
from femixer.priors.base import DirectedPrior, decay_between
from femixer.projection import Columns


class ChannelPrior(DirectedPrior):
    """Separate weights exp(key_i + g_{i+1} + ... + g_t) per value channel; tracks "key" and "gate" (g) [B, T, H, D]."""

    queries_and_keys = False

    @classmethod
    def own_columns(cls, dim: int, heads: int, options: dict[str, Any]) -> tuple[float, float]:
        return 0.0, 1.0

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
        key, gate = (None if name not in tracks else tracks[name].flatten(-2) for name in ("key", "gate"))
        flat, shape = v.flatten(-2), v.shape[-2:]
        # The first axis of the scan's state is its three rows; a State has the batch first.
        state = None if state is None else state.transpose(0, 1)
        beta = None if beta is None else beta.flatten()
        read = channel_scan(key, gate, flat, beta, marks, state, exclusive)
        mean, free, log_total = (None if x is None else x.unflatten(-1, shape) for x in read[:3])
        assert mean is not None
        assert log_total is not None
        return Reading(mean, free, log_total, read.state.transpose(0, 1))

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        some = next(iter(tracks.values()))
        scores = some.new_zeros(some.shape[0], len(rows), *some.shape[1:])
        if "key" in tracks:
            scores = scores + tracks["key"][:, None]
        if "gate" in tracks:
            scores = scores + decay_between(tracks["gate"], rows)
        return scores.permute(0, 3, 1, 2, 4)


class AFTPrior(ChannelPrior):
    """p_t(i) proportional to exp(k_i): one key per value channel, no decay."""

    def columns(self) -> dict[str, Columns]:
        return {"k": Columns(self.heads * self.widths.value)}

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"key": inputs["k"].to(dtype).unflatten(-1, (self.heads, self.widths.value))}
