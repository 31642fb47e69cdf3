"""Linear attention as prior: p_t(i) proportional to <q_t, k_i> with features ReLU(RoPE(.)) + epsilon; and its gated
form (GLA), with input-dependent decay between i and t."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.conditioner import spread_decay_
from femixer.kernels.decayed_linear import FastWeights, decayed_linear_read
from femixer.kernels.reading import Reading
from femixer.kernels.softplus import softplus
from femixer.layout import Layout
from femixer.priors.base import DirectedPrior, Widths, decay_between
from femixer.projection import Columns
from femixer.rotary import Rotation, check_base, rotated

# Small relative to features of order one; large enough that its square is a normal float32 number.
EPSILON = 1e-6
DECAYS = ("scalar", "head", "channel")


class LinearPrior(DirectedPrior):
    """Linear attention with rotary positions and grouped key/value heads; causal or encoder.

    RoPE followed by ReLU depends on absolute positions, which count the real tokens of a segment. A subclass may add
    log decays as the track "gate" [B, T, G, E or 1].
    """

    reads_on = False  # whole sequences are faster, by matrix products

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        rope: bool = True,
        rope_base: float = 10000.0,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, **factory_kwargs)
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
        sums, top = (None, None) if state is None else state
        read = decayed_linear_read(q, k, gate, v, beta, marks, sums, top, exclusive, keep)
        mean, free, log_total, sums, top = read
        state = FastWeights(sums, top) if keep else None
        return Reading(mean, None if beta is None else free, log_total[..., None], state)

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


class GLAPrior(LinearPrior):
    """Gated linear attention: log decays g = -softplus(logits + b).

    decay="head": one gate per key/value head; "scalar": one for all heads; "channel": one per key channel, through a
    low-rank map. b starts with memory spans spread from 2 to 1000 tokens; a single gate starts at 45.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        widths: Widths,
        *,
        causal: bool,
        rope: bool = True,
        rope_base: float = 10000.0,
        decay: str = "head",
        **factory_kwargs: Any,
    ) -> None:
        super().__init__(heads, kv_heads, widths, causal=causal, rope=rope, rope_base=rope_base, **factory_kwargs)
        if decay not in DECAYS:
            raise ValueError(f"decay={decay!r} is unknown; choose one of {', '.join(DECAYS)}")
        self.decay, self.reads_on = decay, decay == "channel"
        self.gates = widths.key if decay == "channel" else 1
        self.shared_columns = () if decay == "head" else ("decay",)
        gated_heads = 1 if decay == "scalar" else kv_heads
        self.rank = min(16, max(1, kv_heads * widths.key // 32)) if decay == "channel" else gated_heads
        self.decay_bias = nn.Parameter(torch.empty(gated_heads, self.gates, **factory_kwargs))
        self.shared_parameters = ("decay_bias",) if decay == "scalar" else ()
        self.decay_map: nn.Parameter | None = None
        if decay == "channel":
            self.decay_map = nn.Parameter(torch.empty(kv_heads * self.gates, self.rank, **factory_kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for bias in self.decay_bias if self.decay == "channel" else [self.decay_bias]:
            spread_decay_(bias)
        if self.decay_map is not None:
            nn.init.normal_(self.decay_map, std=self.rank**-0.5)

    def columns(self) -> dict[str, Columns]:
        return {**super().columns(), "decay": Columns(self.rank, additive=True)}

    def tracks(self, inputs: dict[str, Tensor], layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        features, logits = super().tracks(inputs, layout, dtype), inputs["decay"].to(dtype)
        if self.decay_map is not None:
            logits = F.linear(logits, self.decay_map.to(dtype))
        gate = softplus(logits.unflatten(-1, self.decay_bias.shape), self.decay_bias, scale=-1.0)
        return {**features, "gate": gate.expand(-1, -1, self.kv_heads, -1)}
