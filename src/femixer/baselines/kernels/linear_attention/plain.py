"""Linear attention chunk by chunk: matrix products within a chunk, a state between.

Axes: B batch, T tokens, H heads, E key width, D value width; N chunks of C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from femixer.baselines.kernels.chunks import Decay, carry, chunk_size, decay_of, in_chunks, out_of_chunks
from femixer.kernels.marks import is_padding

# Running it again for the gradients would take longer than keeping what it computes.
DIFFERENTIABLE = True


def forward(
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
    length = v.shape[1]
    chunk = chunk_size(gate, length)
    padding = None if marks is None else is_padding(marks)[..., None, None]
    k = k if padding is None else k.masked_fill(padding, 0)
    qc, kc, vc = (in_chunks(x, chunk) for x in (q, k, v))
    decay = decay_of(gate, marks, chunk, v.device)
    y = decay.mixed(qc, kc, vc) if of_values else decay.scores(qc, kc, exclusive) @ vc
    # The first chunk has no past without a state, and the last one no future if no state is asked for.
    start, stop = int(state is None), vc.shape[2] - int(not keep)
    kept, added = _written(kc[:, :, :stop], vc[:, :, :stop], decay.chunks(0, stop), of_values)
    states = carry(kept, added, state)
    if start < vc.shape[2]:
        before = torch.stack(states[: vc.shape[2] - start], 2)
        past = _read(qc[:, :, start:], before, decay.chunks(start, vc.shape[2]), exclusive, of_values)
        y = y + past if start == 0 else torch.cat([y[:, :, :1], y[:, :, 1:] + past], 2)
    y = out_of_chunks(y, length)
    return y if padding is None else y.masked_fill(padding, 0), states[-1] if keep else v.new_empty(0)


def _written(k: Tensor, v: Tensor, decay: Decay, of_values: bool) -> tuple[Tensor | None, Tensor]:
    """What each chunk leaves of the state before it, factors [B, H, N, 1 or E, 1 or D], and adds [B, H, N, E, D]."""
    kept = decay.keeping(v.dtype)
    if not of_values:
        return kept, decay.writing(k).mT @ v
    return None if kept is None else kept.mT, k.mT @ decay.writing(v)


def _read(q: Tensor, before: Tensor, decay: Decay, exclusive: bool, of_values: bool) -> Tensor:
    """What queries read of the states before their chunks [B, H, N, C, D]."""
    return decay.reading(q @ before) if of_values else decay.reading(q, exclusive) @ before
