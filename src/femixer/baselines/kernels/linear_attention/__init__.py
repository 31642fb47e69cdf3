"""Linear attention with decays, unnormalized.

    S_t = exp(gate_t) * S_{t-1} + k_t v_tᵀ,    y_t = S_tᵀ q_t   (exclusive: y_t = S_{t-1}ᵀ q_t)

q and k have any sign; gate <= 0 is one log decay per head, one per key channel, one per value channel, or none.

Axes: B batch, T tokens, H heads, E key width, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.baselines.kernels.linear_attention import plain
from femixer.kernels.operator import Operator, without_autocast


def _results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
    exclusive: bool,
    of_values: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    batch, _, heads, width = v.shape
    last = v.new_empty(batch, heads, k.shape[3], width) if keep else v.new_empty(0)
    return torch.empty_like(v, memory_format=torch.contiguous_format), last


OPERATOR = Operator(__name__, _results, outputs=2)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    marks: Tensor | None = None,
    state: Tensor | None = None,
    exclusive: bool = False,
    of_values: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(y [B, T, H, D], zero at padding, and the state after the last token [B, H, E, D] if `keep`), both in float32 at
    least.

    q, k [B, T, H, E], or [B, T, 1, E] where all heads share them; v [B, T, H, D]; gate [B, T, H], [B, T, H, E] or,
    `of_values`, [B, T, H, D], with a batch of one where all sequences share it; marks [B, T] (see
    femixer.kernels.marks); state [B, H, E, D] before the tokens. exclusive and of_values exclude each other.
    """
    assert not (exclusive and of_values)
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    arguments = q, k, v, gate, marks, state, exclusive, of_values, keep
    if gate is None or gate.dim() == 3:
        # A few matrix products, in torch on every device; compilers see through them.
        with without_autocast(v.device):
            y, last = plain.forward(*arguments)
    else:
        y, last = OPERATOR(*arguments)
    return y, last if keep else None
