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
from femixer.kernels.numba_kernel import kernel, strided
from femixer.kernels.streams import least_log

FLOATS, STATES, FILLED = (torch.float32, torch.float64), ("sums", "top"), True
# Sums of exponentials below these may have lost terms.
LEAST = {dtype: math.exp(least_log(dtype)) for dtype in FLOATS}


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

    def of_one(self, b: int, g: int) -> Inputs:
        """The arguments of one sequence and key/value head, without a state."""
        row, group = slice(b, b + 1), slice(g, g + 1)
        return Inputs(
            self.q[row, :, g * self.repeats : (g + 1) * self.repeats],
            self.k[row, :, group],
            None if self.gate is None else self.gate[row, :, group],
            self.v[row, :, group],
            None if self.beta is None else self.beta[group],
            None if self.marks is None else self.marks[row],
            None,
            None,
            self.exclusive,
            False,
        )


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = Inputs(*arguments)
    q, v = given.q, given.v
    if not given.chunked:
        return *_read_tokens(given), torch.empty(q.shape[0], q.shape[2], dtype=torch.bool)
    mean, free, log_total = _outputs(given)
    doubts = torch.zeros(q.shape[0], q.shape[2], dtype=torch.long)
    products_forward(*_operands(given), given.exclusive, LEAST[v.dtype], mean, free, log_total, doubts)
    # Key/value heads are read again whole.
    exact = (doubts > 0).unflatten(1, (-1, given.repeats)).any(-1).repeat_interleave(given.repeats, 1)
    for b, g in _again(exact, given.repeats):
        heads = slice(g * given.repeats, (g + 1) * given.repeats)
        one_mean, one_free, one_log, *_ = _read_tokens(given.of_one(b, g))
        mean[b, :, heads], log_total[b, :, heads] = one_mean[0], one_log[0]
        if given.beta is not None:
            free[b, :, heads] = one_free[0]
    nothing = torch.empty(0, dtype=torch.float64)
    return mean, free, log_total, nothing, nothing.clone(), exact


def _outputs(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    mean = given.v.new_empty(*given.q.shape[:3], given.v.shape[3])
    free = given.v.new_empty(0, 0, 0, 0) if given.beta is None else mean.new_empty(*mean.shape)
    return mean, free, given.v.new_empty(given.q.shape[:3])


def _again(exact: Tensor, repeats: int) -> list[tuple[int, int]]:
    """Sequences and key/value heads to be read again."""
    if not bool(exact.any()):
        return []
    return [(b, g) for b, g in exact[:, ::repeats].nonzero().tolist()]


def _operands(given: Inputs) -> list[Any]:
    """What the loops by products read; empty tensors for what is not there."""
    q, k, gate, v, beta, marks, *_ = given
    gate = v.new_empty(0, 0, 0, 0) if gate is None else gate
    beta = v.new_empty(0, 0) if beta is None else beta
    return [*strided(q, k, v), (*q.shape, *v.shape[2:]), gate, beta, NO_MARKS if marks is None else marks]


def _token_operands(given: Inputs) -> list[Any]:
    """The same for the loops by tokens."""
    q, k, gate, v, beta, marks, sums, top, *_ = given
    gate = v.new_empty(0, 0, 0, 0) if gate is None else gate
    beta = v.new_empty(0, 0) if beta is None else beta
    sums = v.new_empty(0, 0, 0, 0, dtype=torch.float64) if sums is None else sums
    top = v.new_empty(0, 0, 0, dtype=torch.float64) if top is None else top
    return [q, k, gate, v, beta, NO_MARKS if marks is None else marks, sums, top]


def _read_tokens(given: Inputs) -> tuple[Tensor, ...]:
    batch, _, groups, width = given.v.shape
    results = _outputs(given)
    columns = width + 1 if given.beta is None else 2 * width + 1
    last = torch.empty(batch, groups, given.k.shape[3], columns, dtype=torch.float64)
    last_top = torch.empty(batch, groups, width, dtype=torch.float64)
    tokens_forward(*_token_operands(given), given.exclusive, *results, last, last_top)
    if given.keep:
        return *results, last, last_top
    return *results, last.new_empty(0), last.new_empty(0)


def backward(
    grads: tuple[Tensor, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    given = Inputs(*arguments)
    to_mean, to_free, to_log, to_last, *_ = grads
    if not given.chunked:
        d_q, d_k, d_gate, d_v, d_beta, d_sums = _token_gradients(given, to_mean, to_free, to_log, to_last)
        return d_q, d_k, d_gate, d_v, d_beta, None, d_sums, None
    mean, free, log_total, *_, exact = results
    d_q, d_k, d_gate, d_v, d_beta = _product_gradients(given, (mean, free, log_total, exact, to_mean, to_free, to_log))
    for b, g in _again(exact, given.repeats):
        at = slice(b, b + 1), slice(None), slice(g * given.repeats, (g + 1) * given.repeats)
        one_free = to_free if given.beta is None else to_free[at]
        one = _token_gradients(given.of_one(b, g), to_mean[at], one_free, to_log[at], to_last)
        d_q[at] = one[0]
        for whole, part in ((d_k, one[1]), (d_gate, one[2]), (d_v, one[3])):
            if whole is not None and part is not None:
                whole[b, :, g] = part[0, :, 0]
        if d_beta is not None and one[4] is not None:
            d_beta[g] += one[4][0]
    return d_q, d_k, d_gate, d_v, d_beta, None, None, None


def _product_gradients(
    given: Inputs, read: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Of q, k, gate, v and beta, without those of heads that were read again."""
    q, v, repeats = given.q, given.v, given.repeats
    d_q, d_k, d_v = (v.new_zeros(*q.shape[:3], width) for width in (q.shape[3], q.shape[3], v.shape[3]))
    d_gate = v.new_zeros(*q.shape[:3] if given.gate is not None else (0, 0, 0))
    d_beta = v.new_zeros(q.shape[0], q.shape[2], v.shape[3])
    products_backward(*_operands(given), given.exclusive, *read, d_q, d_k, d_gate, d_v, d_beta)
    return (
        d_q,
        _fold(d_k, repeats),
        None if given.gate is None else _fold(d_gate[..., None], repeats),
        _fold(d_v, repeats),
        None if given.beta is None else d_beta.sum(0).unflatten(0, (-1, repeats)).sum(1),
    )


def _fold(x: Tensor, repeats: int) -> Tensor:
    """[B, T, H, W] -> [B, T, G, W]: repeats summed."""
    return x if repeats == 1 else x.unflatten(2, (-1, repeats)).sum(3)


def _token_gradients(
    given: Inputs, to_mean: Tensor, to_free: Tensor, to_log: Tensor, to_last: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    q, k, gate, v, beta, _, sums, *_ = given
    d_q, d_k, d_v = (v.new_empty(x.shape) for x in (q, k, v))
    d_gate = v.new_empty((0, 0, 0, 0) if gate is None else gate.shape)
    d_beta = torch.zeros(v.shape[0], *v.shape[2:], dtype=torch.float64)
    d_sums = d_beta.new_empty((0, 0, 0, 0) if sums is None else sums.shape)
    to_last = to_last if given.keep else d_beta.new_empty(0, 0, 0, 0)
    gradients = to_mean, to_free, to_log, to_last, d_q, d_k, d_gate, d_v, d_beta, d_sums
    tokens_backward(*_token_operands(given), given.exclusive, *gradients)
    return (
        d_q,
        d_k,
        None if gate is None else d_gate,
        d_v,
        None if beta is None else d_beta.sum(0).to(v.dtype),
        None if sums is None else d_sums,
    )


@kernel
def products_forward(q, k, v, at, shape, gate, beta, marks, exclusive, least, mean, free, log_total, doubts):  # type: ignore[no-untyped-def]
    for index in prange(shape[0] * shape[2]):
        forward_chunks(
            index // shape[2], index % shape[2], q, k, v, at, shape, gate, beta, marks, exclusive, least,
            mean, free, log_total, doubts,
        )  # fmt: skip


@kernel
def products_backward(  # type: ignore[no-untyped-def]
    q, k, v, at, shape, gate, beta, marks, exclusive, mean, free, log_total, left_out, to_mean, to_free, to_log,
    d_q, d_k, d_gate, d_v, d_beta,
):  # fmt: skip
    """Gradients of heads that are left_out [B, H] are not written."""
    for index in prange(shape[0] * shape[2]):
        if not left_out[index // shape[2], index % shape[2]]:
            backward_chunks(
                index // shape[2], index % shape[2], q, k, v, at, shape, gate, beta, marks, exclusive,
                mean, free, log_total, to_mean, to_free, to_log, d_q, d_k, d_gate, d_v, d_beta,
            )  # fmt: skip


@kernel
def tokens_forward(  # type: ignore[no-untyped-def]
    q, k, gate, v, beta, marks, state, top, exclusive, mean, free, log_total, last, last_top
):  # fmt: skip
    for index in prange(v.shape[0] * v.shape[2]):
        forward_tokens(
            index // v.shape[2], index % v.shape[2], q, k, gate, v, beta, marks, state, top, exclusive,
            mean, free, log_total, last, last_top,
        )  # fmt: skip


@kernel
def tokens_backward(  # type: ignore[no-untyped-def]
    q, k, gate, v, beta, marks, state, top, exclusive, to_mean, to_free, to_log, to_last,
    d_q, d_k, d_gate, d_v, d_beta, d_state,
):  # fmt: skip
    for index in prange(v.shape[0] * v.shape[2]):
        backward_tokens(
            index // v.shape[2], index % v.shape[2], q, k, gate, v, beta, marks, state, top, exclusive,
            to_mean, to_free, to_log, to_last, d_q, d_k, d_gate, d_v, d_beta, d_state,
        )  # fmt: skip
