"""The state-space read as one compiled loop over time for a block of channels, each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.arrays import array
from femixer.kernels.marks import no_marks
from femixer.kernels.operator import filled
from femixer.kernels.state_space import numba_loops as loops

# Dimensions of an argument that is not there, from rate to top.
_DIMS = (2, 3, 3, 3, 2, 1, 3, 1, 2, 4, 2)
_MARKS = 8


def refuse(*arguments: Any) -> str | None:
    *given, sums, top, _ = arguments
    kinds = {x.dtype for x in given if x is not None and x.is_floating_point()}
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        return f"it takes float32 or float64 throughout, not {', '.join(sorted(map(str, kinds)))}"
    if sums.dtype != torch.float64 or top.dtype != torch.float64:
        return f"it takes states of float64, not {sums.dtype} and {top.dtype}"
    return None


def _arrays(arguments: tuple[Any, ...]) -> list[Any]:
    """As the loops take them: empty arrays for what is not there."""
    *tensors, exclusive = arguments
    like = tensors[0]
    return [
        *(
            array(x.contiguous() if x is not None else no_marks() if i == _MARKS else like.new_empty((0,) * _DIMS[i]))
            for i, x in enumerate(tensors)
        ),
        exclusive,
    ]


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    v, beta, _, sums, top = arguments[6:11]
    free = v.new_empty((0, 0, 0) if beta is None else v.shape)
    results = v.new_empty(v.shape), free, v.new_empty(v.shape), sums.new_empty(sums.shape), top.new_empty(top.shape)
    loops.forward(*_arrays(arguments), *map(array, results))
    return results


READS_RESULTS = False


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    rate, step, write, read, v, beta, sums = (arguments[i] for i in (0, 1, 2, 3, 6, 7, 9))
    batch, length, width = v.shape
    like = (v, v.new_empty((0, 0, 0) if beta is None else v.shape), v, sums)
    given = filled(grads[:4], like)
    blocks, modes = -(-width // loops.LANES), rate.shape[0]
    to_v, to_sums = v.new_empty(v.shape), sums.new_empty(sums.shape)
    to_step = v.new_empty((0, 0, 0) if step is None else v.shape)
    parts = [v.new_empty((0,) * 4 if x is None else (batch, blocks, length, modes)) for x in (write, read)]
    per_mode = [sums.new_zeros(batch, modes, width) for _ in range(2)]
    per_channel = [sums.new_zeros(batch, width) for _ in range(2)]
    found = (per_mode[0], to_step, *parts, per_mode[1], per_channel[0], to_v, per_channel[1], to_sums)
    loops.backward(*_arrays(arguments), *map(array, (*given, *found)))
    to_write, to_read = (part.sum(1) for part in parts)
    to_rate, to_weight, to_skip, to_beta = (x.sum(0).to(v.dtype) for x in (*per_mode, *per_channel))
    gradients = (to_rate, to_step, to_write, to_read, to_weight, to_skip, to_v, to_beta, None, to_sums, None)
    return tuple(None if x is None else g for x, g in zip(arguments[:11], gradients, strict=True))
