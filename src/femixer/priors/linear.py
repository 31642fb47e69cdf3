"""Linear attention as prior: p_t(i) proportional to <q_t, k_i> with features ReLU(RoPE(.)) + epsilon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.decayed_linear import decayed_linear_read
from femixer.kernels.reading import Reading
from femixer.layout import Layout
from femixer.priors.base import Widths
from femixer.priors.directed import DirectedPrior, decay_between
from femixer.projection import Columns
from femixer.rotary import Rotation, check_base, rotated

# Small against features of order one; large enough that the sum of two products of it is a normal number.
EPSILON = 1e-6


class LinearPrior(DirectedPrior):
    """Rotary positions, grouped key/value heads; causal or encoder. RoPE followed by ReLU is not relative: positions
    count the real tokens of a segment. A subclass may add log decays as the track "gate" [B, T, G, E or 1]."""

    reads_on = False  # whole sequences are read by matrix products

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        rope: bool = True,
        rope_base: float = 10000.0,
        **made: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **made)
        check_base(rope_base)
        self.rope, self.rope_base = rope, rope_base

    def columns(self) -> dict[str, Columns]:
        width = self.widths.key
        return {"q": Columns(self.heads * width), "k": Columns(self.kv_heads * width)}

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        if self.rope:
            rotation = Rotation(layout.position, self.widths.key, self.rope_base, EPSILON)
            q, k = rotated(inputs["q"], inputs["k"], rotation, dtype)
        else:
            q, k = (inputs[name].to(dtype).unflatten(-1, (-1, self.widths.key)).relu() + EPSILON for name in ("q", "k"))
        return {"q": q, "k": k}

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
        q, k, gate = tracks["q"], tracks["k"], tracks.get("gate")
        read = decayed_linear_read(q, k, gate, v, beta, marks, state, exclusive, keep)
        return Reading(read.mean, read.free, read.log_total[..., None], read.state)

    def log_scores(self, tracks: dict[str, Tensor], rows: Tensor) -> Tensor:
        repeats = self.heads // self.kv_heads
        q, k = tracks["q"][:, rows], tracks["k"].repeat_interleave(repeats, 2)
        if "gate" not in tracks:
            return torch.einsum("bthe,bshe->bhts", q, k).log()
        gate = tracks["gate"].repeat_interleave(repeats, 2)
        decay = decay_between(gate, rows)  # [B, rows, T, H, E or 1]
        if gate.shape[-1] == 1:
            return torch.einsum("bthe,bshe->bhts", q, k).log() + decay[..., 0].permute(0, 3, 1, 2)
        terms = q.log()[:, :, None] + k.log()[:, None] + decay
        return terms.logsumexp(-1).permute(0, 3, 1, 2)
