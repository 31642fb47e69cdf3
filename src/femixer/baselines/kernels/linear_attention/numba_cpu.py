"""Linear attention with decays per channel, token by token in a compiled loop.

On a CPU this is several times faster than matrix products within chunks at the widths of heads in use: there decays per
channel make every factor of a product anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.baselines.kernels.linear_attention import numba_loops as loops
from femixer.kernels.arrays import array
from femixer.kernels.marks import no_marks
from femixer.kernels.operator import filled


def refuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
    exclusive: bool,
    of_values: bool,
    keep: bool,
) -> str | None:
    if gate is None or gate.dim() == 3:
        return "it takes decays per channel; with one per head or none, torch's matrix products are as fast"
    kinds = {x.dtype for x in (q, k, v, gate)}
    if kinds != {torch.float32}:
        return f"it takes float32, not {', '.join(sorted(map(str, kinds)))}"
    if any(x.shape[:3] != v.shape[:3] for x in (q, k, gate)):
        return "it takes queries, keys and gates of every sequence and head"
    return None


def _complete(arguments: tuple[Any, ...]) -> list[Any]:
    q, k, v, gate, marks, state = arguments[:6]
    batch, _, heads, width = v.shape
    state = v.new_zeros(batch, heads, k.shape[3], width) if state is None else state.to(v.dtype)
    given = (q, k, v, gate, no_marks() if marks is None else marks, state)
    return [array(x.contiguous()) for x in given]


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
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    given = _complete((q, k, v, gate, marks, state))
    loops.forward(*given, exclusive, of_values, array(y), array(last))
    return y, last if keep else v.new_empty(0)


READS_RESULTS = False


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, gate, _, state, exclusive, of_values, _ = arguments
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    # Zero at padding.
    found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, gate, last)]
    to_y, to_last = filled(grads if grads[1] is None or grads[1].numel() else (grads[0], None), (v, last))
    loops.backward(array(to_y), array(to_last), *_complete(arguments), exclusive, of_values, *map(array, found))
    return *found[:4], None, None if state is None else found[4].to(state.dtype)
