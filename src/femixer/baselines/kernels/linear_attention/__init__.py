"""Linear attention with decays, unnormalized.

    S_t = exp(gate_t) * S_{t-1} + k_t v_tᵀ,    y_t = S_tᵀ q_t

q and k have any sign; gate <= 0 is one log decay per head, one per key channel, one per value channel, or none.

Axes: B batch, T tokens, H heads, E key width, D value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.baselines.kernels.chunks import Decay, carry, chunk_size, decay_of, in_chunks, out_of_chunks
from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import Operator, without_autocast


def _results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
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
    of_values: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(y [B, T, H, D], zero at padding, and the state after the last token [B, H, E, D] if `keep`), both in float32 at
    least.

    q, k [B, T, H, E], or [B, T, 1, E] where all heads share them; v [B, T, H, D]; gate [B, T, H], [B, T, H, E] or,
    `of_values`, [B, T, H, D], with a batch of one where all sequences share it; marks [B, T] (see
    femixer.kernels.marks); state [B, H, E, D] before the tokens.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    arguments = q, k, v, gate, marks, state, of_values, keep
    if gate is None or gate.dim() == 3:
        # A few matrix products, in torch on every device; compilers see through them.
        with without_autocast(v.device):
            y, last = forward(*arguments)
    else:
        y, last = OPERATOR(*arguments)
    return y, last if keep else None


# Running it again for the gradients would take longer than keeping what it computes.
DIFFERENTIABLE = True


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """In torch's operations, chunk by chunk: matrix products within a chunk, a state between. N chunks of C tokens."""
    q, k, v, gate, marks, state, of_values, keep = arguments
    length = v.shape[1]
    chunk = chunk_size(gate, length)
    padding = None if marks is None else is_padding(marks)[..., None, None]
    k = k if padding is None else k.masked_fill(padding, 0)
    qc, kc, vc = (in_chunks(x, chunk) for x in (q, k, v))
    decay = decay_of(gate, marks, chunk, v.device)
    y = decay.mixed(qc, kc, vc) if of_values else decay.scores(qc, kc) @ vc
    # The first chunk has no past without a state, and the last one no future if no state is asked for.
    start, stop = int(state is None), vc.shape[2] - int(not keep)
    kept, added = _written(kc[:, :, :stop], vc[:, :, :stop], decay.chunks(0, stop), of_values)
    states = carry(kept, added, state)
    if start < vc.shape[2]:
        before = torch.stack(states[: vc.shape[2] - start], 2)
        past = _read(qc[:, :, start:], before, decay.chunks(start, vc.shape[2]), of_values)
        y = y + past if start == 0 else torch.cat([y[:, :, :1], y[:, :, 1:] + past], 2)
    y = out_of_chunks(y, length)
    return y if padding is None else y.masked_fill(padding, 0), states[-1] if keep else v.new_empty(0)


def _written(k: Tensor, v: Tensor, decay: Decay, of_values: bool) -> tuple[Tensor | None, Tensor]:
    """What each chunk leaves of the state before it, factors [B, H, N, 1 or E, 1 or D], and adds [B, H, N, E, D]."""
    kept = decay.keeping(v.dtype)
    if not of_values:
        return kept, decay.writing(k).mT @ v
    return None if kept is None else kept.mT, k.mT @ decay.writing(v)


def _read(q: Tensor, before: Tensor, decay: Decay, of_values: bool) -> Tensor:
    """What queries read of the states before their chunks [B, H, N, C, D]."""
    return decay.reading(q @ before) if of_values else decay.reading(q) @ before


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """Token by token in float64."""
    q, k, v, gate, marks, state, of_values, keep = arguments
    q, k, v = (x.double() for x in (q, k, v))
    batch, length, heads, width = v.shape
    s = v.new_zeros(batch, heads, k.shape[3], width) if state is None else state.double()
    decay = v.new_ones(1, length, 1, 1, 1)
    if gate is not None:
        decay = gate.double().exp()
        decay = decay[..., None, None] if gate.dim() == 3 else decay[..., None, :] if of_values else decay[..., None]
    marks = torch.zeros(batch, length, dtype=torch.int8, device=v.device) if marks is None else marks
    rows = []
    for t in range(length):
        padding, start = (f(marks[:, t])[:, None, None, None] for f in (is_padding, is_start))
        s = torch.where(start, 0, s)
        s = torch.where(padding, s, decay[:, t] * s + k[:, t, :, :, None] * v[:, t, :, None])
        rows.append(torch.where(padding[..., 0], 0, (s * q[:, t, :, :, None]).sum(2)))
    return torch.stack(rows, 1), s if keep else v.new_empty(0)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)

    def drawn(length: int, batch: int = 2, heads: int = 3) -> tuple[Tensor, ...]:
        """q, k, v, gates [B, T, H, E, D] and a state."""
        q, k = torch.randn(2, batch, length, heads, 5)
        gate = (
            -torch.rand(batch, length, heads, 5, 7)
            * torch.tensor([0.01, 1.0, 50.0])[torch.arange(length) % 3, None, None, None]
        )
        return q, k, torch.randn(batch, length, heads, 7), gate, torch.randn(batch, heads, 5, 7)

    def marked(batch: int, length: int) -> Tensor:
        """Padding anywhere and segments of any length; the first row starts none."""
        random, marks = torch.rand(batch, length), torch.zeros(batch, length, dtype=torch.int8)
        marks[random < 0.2] = PADDING
        marks[1:][random[1:] > 0.9] = START
        return marks

    q, k, v, gate, state = drawn(131)
    marks = marked(2, 131)
    one, shared = drawn(1), (q[:, :, :1], k[:, :, :1])
    return {
        "no decays": (q, k, v, None, marks, state, False, True),
        "per head": (q, k, v, gate[..., 0, 0], marks, state, False, True),
        "shared by heads and batch": (*shared, v, gate[:1, ..., 0, 0], None, None, False, False),
        "per key channel": (q, k, v, gate[..., 0], marks, state, False, True),
        "per key channel, no state": (q, k, v, gate[..., 0], None, None, False, False),
        "per value channel": (q, k, v, gate[..., 0, :], marks, state, True, True),
        "one token": (*one[:3], one[3][..., 0], None, one[4], False, True),
    }
