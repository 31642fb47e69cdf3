"""Softmax attention as everyone runs it: projections, rotary positions and torch's fused attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femixer.rotary import rotary_angles, rotate
from femixer.state import Growing

ROPE_BASE = 10000.0


class AttentionState(NamedTuple):
    """Rotated keys and values of the tokens seen, [B, G, S, E] each: the layout that one query reads fastest."""

    keys: Growing
    values: Growing


class Attention(nn.Module):
    """y_t = sum_i softmax_i(<q_t, k_i> / sqrt(E)) v_i W_o, [B, T, dim] -> [B, T, dim], with E = dim / heads.

    The rival that the benchmarks measure against, so nothing here may cost more than it must: 4 dim² parameters
    (2 (1 + G/H) dim² with G key/value heads), and FreeEnergyMixer(parts="") computes the same function.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool = True,
        kv_heads: int | None = None,
        rope: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        for name, given in (("dim", dim), ("heads", heads), ("kv_heads", kv_heads)):
            if given < 1:
                raise ValueError(f"{name}={given!r} must be a positive integer")
        if dim % heads:
            raise ValueError(f"dim={dim} is not divisible by heads={heads}")
        if heads % kv_heads:
            raise ValueError(f"heads={heads} is not divisible by kv_heads={kv_heads}")
        if rope and dim // heads % 2:
            raise ValueError(
                f"dim={dim} with heads={heads} gives heads of {dim // heads} channels; rope needs an even number"
            )
        self.dim, self.heads, self.kv_heads, self.causal, self.rope = dim, heads, kv_heads, causal, rope
        self.width = dim // heads
        # Two products are as fast as one, and what is rotated need not stay in memory with the values.
        self.query_key_proj = nn.Linear(dim, (heads + kv_heads) * self.width, bias=bias, device=device, dtype=dtype)
        self.value_proj = nn.Linear(dim, kv_heads * self.width, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query_key_proj, self.value_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, AttentionState]:
        """x [B, T, dim] -> [B, T, dim], with return_state also the state from which the next tokens go on."""
        if not self.causal and (state is not None or return_state):
            raise ValueError("state and return_state need causal=True; this layer was built with causal=False")
        q, k, v = self._heads(x, 0 if state is None else state.keys.length)
        if state is not None:
            state = AttentionState(state.keys.append(k), state.values.append(v))
            k, v = state.keys.tensor, state.values.tensor
        elif return_state:
            state = AttentionState(Growing.of(k.contiguous()), Growing.of(v.contiguous()))
        y = self.out_proj(self._attend(q, k, v).transpose(1, 2).flatten(2))
        if not return_state:
            return y
        assert state is not None
        return y, state

    def _heads(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, E], keys and values [B, G, T, E] of tokens whose first has position `start`."""
        qk, v = (proj(x).unflatten(-1, (-1, self.width)) for proj in (self.query_key_proj, self.value_proj))
        q, k = qk.split((self.heads, self.kv_heads), 2)
        if self.rope:
            position = torch.arange(start, start + x.shape[1], device=x.device)[None]
            wide = torch.promote_types(q.dtype, torch.float32)  # rotations know no smaller numbers
            cos, sin = rotary_angles(position, self.width, ROPE_BASE, wide)
            q, k = (rotate(part.to(wide), cos, sin).to(part.dtype) for part in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, T, E]; causal queries are the last T of the S keys."""
        (batch, heads, length, width), seen = q.shape, k.shape[2]
        if length == 1:
            # The queries that share a key become rows of one product, so grouped keys are read once.
            grouped = q.reshape(batch, self.kv_heads, -1, width)
            return F.scaled_dot_product_attention(grouped, k, v).view(q.shape)
        mask = None
        if self.causal and length != seen:
            mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal and mask is None, enable_gqa=heads != self.kv_heads
        )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, rope={self.rope}"
