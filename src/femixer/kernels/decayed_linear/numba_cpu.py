"""Decayed linear attention as compiled loops: by matrix products where a head has one gate or none and no state is
asked for, else token by token. Heads whose sums show too little in the first way are read again in the second.

Both ways pay: layers of T 16 to 2048 with one gate per head take 1.1 to 1.6 times as long token by token; those with a
gate per channel 1.9 to 3.6 times as long in plain torch, and a decoded token of a language model 1.9 times.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from numba import prange
from torch import Tensor

from femixer.kernels.decayed_linear.numba_loops_chunked import backward_chunks, forward_chunks
from femixer.kernels.decayed_linear.numba_loops_tokens import backward_tokens, forward_tokens
from femixer.kernels.marks import NO_MARKS
from femixer.kernels.numba_kernel import kernel
from femixer.kernels.streams import least_log

FLOATS, STATES, FILLED = (torch.float32, torch.float64), ("sums", "top"), True
# Sums of exponentials below these may have lost terms.
LEAST = {dtype: math.exp(least_log(dtype)) for dtype in FLOATS}
EVERY_HEAD = torch.empty(0, 0, dtype=torch.bool)


class Inputs(NamedTuple):
    """The operator's arguments."""

    q: Tensor
    k: Tensor
    gate: Tensor | None
    v: Tensor
    beta: Tensor | None
    marks: Tensor | None
    sums: Tensor | None
    top: Tensor | None
    exclusive: bool
    keep: bool

    @property
    def repeats(self) -> int:
        return self.q.shape[2] // self.v.shape[2]

    @property
    def chunked(self) -> bool:
        return self.sums is None and not self.keep and (self.gate is None or self.gate.shape[3] == 1)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = Inputs(*arguments)
    q, v = given.q, given.v
    results = _outputs(given)
    if not given.chunked:
        return (
            *results,
            *_read_tokens(given, results, EVERY_HEAD),
            torch.empty(q.shape[0], q.shape[2], dtype=torch.bool),
        )
    doubts = torch.zeros(q.shape[0], q.shape[2], dtype=torch.long)
    products_forward(*_operands(given), given.exclusive, LEAST[v.dtype], *results, doubts)
    # Heads that share a key/value head are read again together.
    again = (doubts > 0).unflatten(1, (-1, given.repeats)).any(-1)
    if bool(again.any()):
        _read_tokens(given, results, again)
    nothing = torch.empty(0, dtype=torch.float64)
    return *results, nothing, nothing.clone(), again.repeat_interleave(given.repeats, 1)


def _outputs(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    mean = given.v.new_empty(*given.q.shape[:3], given.v.shape[3])
    free = given.v.new_empty(0, 0, 0, 0) if given.beta is None else mean.new_empty(*mean.shape)
    return mean, free, given.v.new_empty(given.q.shape[:3])


def _operands(given: Inputs) -> list[Any]:
    """What the loops read; empty tensors for what is not there."""
    q, k, gate, v, beta, marks, *_ = given
    gate = v.new_empty(0, 0, 0, 0) if gate is None else gate
    beta = v.new_empty(0, 0) if beta is None else beta
    return [q, k, gate, v, beta, NO_MARKS if marks is None else marks]


def _state(given: Inputs) -> list[Tensor]:
    """What the loops by tokens read besides."""
    sums = torch.empty(0, 0, 0, 0, dtype=torch.float64) if given.sums is None else given.sums
    return [sums, torch.empty(0, 0, 0, dtype=torch.float64) if given.top is None else given.top]


def _read_tokens(given: Inputs, results: tuple[Tensor, ...], heads: Tensor) -> tuple[Tensor, Tensor]:
    """Write the results of the key/value `heads` [B, G], and return the state after them if it is kept."""
    batch, _, groups, width = given.v.shape
    columns = width + 1 if given.beta is None else 2 * width + 1
    last = torch.empty(batch, groups, given.k.shape[3], columns, dtype=torch.float64)
    last_top = torch.empty(batch, groups, width, dtype=torch.float64)
    tokens_forward(*_operands(given), *_state(given), given.exclusive, heads, *results, last, last_top)
    return (last, last_top) if given.keep else (last.new_empty(0), last.new_empty(0))


def backward(
    grads: tuple[Tensor, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    given = Inputs(*arguments)
    q, k, gate, v, beta, _, sums, *_ = given
    to_mean, to_free, to_log, to_last, *_ = grads
    mean, free, log_total, *_, exact = results
    again = exact[:, :: given.repeats] if given.chunked else EVERY_HEAD
    d_sums = v.new_empty((0, 0, 0, 0) if sums is None else sums.shape, dtype=torch.float64)
    if given.chunked:
        read = mean, free, log_total, exact, to_mean, to_free, to_log
        d_q, d_k, d_gate, d_v, d_beta = _product_gradients(given, read)
    else:
        d_q, d_k, d_v = (v.new_empty(x.shape) for x in (q, k, v))
        d_gate = v.new_empty((0, 0, 0, 0) if gate is None else gate.shape)
        d_beta = v.new_zeros(v.shape[0], *v.shape[2:], dtype=torch.float64)
    if not given.chunked or bool(again.any()):
        to_last = to_last if given.keep else d_beta.new_empty(0, 0, 0, 0)
        gradients = to_mean, to_free, to_log, to_last, d_q, d_k, d_gate, d_v, d_beta, d_sums
        tokens_backward(*_operands(given), *_state(given), given.exclusive, again, *gradients)
    return (
        d_q,
        d_k,
        None if gate is None else d_gate,
        d_v,
        None if beta is None else d_beta.sum(0).to(v.dtype),
        None,
        None if sums is None else d_sums,
        None,
    )


def _product_gradients(given: Inputs, read: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of q, k, gate, v and, for every sequence, beta, without those of heads that were read again."""
    q, v, repeats = given.q, given.v, given.repeats
    d_q, d_k, d_v = (v.new_zeros(*q.shape[:3], width) for width in (q.shape[3], q.shape[3], v.shape[3]))
    d_gate = v.new_zeros(*q.shape[:3] if given.gate is not None else (0, 0, 0))
    d_beta = v.new_zeros(q.shape[0], q.shape[2], v.shape[3])
    products_backward(*_operands(given), given.exclusive, *read, d_q, d_k, d_gate, d_v, d_beta)
    d_beta = _fold(d_beta[:, None].double(), repeats)[:, 0]
    return d_q, _fold(d_k, repeats), _fold(d_gate[..., None], repeats), _fold(d_v, repeats), d_beta


def _fold(x: Tensor, repeats: int) -> Tensor:
    """[B, T, H, W] -> [B, T, G, W]: repeats summed."""
    return x if repeats == 1 else x.unflatten(2, (-1, repeats)).sum(3)


@kernel
def products_forward(q, k, gate, v, beta, marks, exclusive, least, mean, free, log_total, doubts):  # type: ignore[no-untyped-def]
    for index in prange(q.shape[0] * q.shape[2]):
        forward_chunks(
            index // q.shape[2], index % q.shape[2], q, k, gate, v, beta, marks, exclusive, least,
            mean, free, log_total, doubts,
        )  # fmt: skip


@kernel
def products_backward(  # type: ignore[no-untyped-def]
    q, k, gate, v, beta, marks, exclusive, mean, free, log_total, left_out, to_mean, to_free, to_log,
    d_q, d_k, d_gate, d_v, d_beta,
):  # fmt: skip
    """Gradients of heads that are left_out [B, H] are not written."""
    for index in prange(q.shape[0] * q.shape[2]):
        if not left_out[index // q.shape[2], index % q.shape[2]]:
            backward_chunks(
                index // q.shape[2], index % q.shape[2], q, k, gate, v, beta, marks, exclusive,
                mean, free, log_total, to_mean, to_free, to_log, d_q, d_k, d_gate, d_v, d_beta,
            )  # fmt: skip


@kernel
def tokens_forward(  # type: ignore[no-untyped-def]
    q, k, gate, v, beta, marks, state, top, exclusive, heads, mean, free, log_total, last, last_top
):  # fmt: skip
    """Only of `heads` [B, G], if it is not empty."""
    for index in prange(v.shape[0] * v.shape[2]):
        if not heads.size or heads[index // v.shape[2], index % v.shape[2]]:
            forward_tokens(
                index // v.shape[2], index % v.shape[2], q, k, gate, v, beta, marks, state, top, exclusive,
                mean, free, log_total, last, last_top,
            )  # fmt: skip


@kernel
def tokens_backward(  # type: ignore[no-untyped-def]
    q, k, gate, v, beta, marks, state, top, exclusive, heads, to_mean, to_free, to_log, to_last,
    d_q, d_k, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    """Only of `heads`."""
    for index in prange(v.shape[0] * v.shape[2]):
        if not heads.size or heads[index // v.shape[2], index % v.shape[2]]:
            backward_tokens(
                index // v.shape[2], index % v.shape[2], q, k, gate, v, beta, marks, state, top, exclusive,
                to_mean, to_free, to_log, to_last, d_q, d_k, d_gate, d_v, d_beta, d_state,
            )  # fmt: skip
