"""The gated softmax read by fused kernels: the gates are the last step of the read, and the first of its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.softmax import triton_call
from femixer.kernels.softmax.triton_call import Call, Gates
from femixer.kernels.softmax.triton_gpu import Found, backward_of, looks_ahead, read, tops_shape
from femixer.kernels.softmax.visibility import Visibility
from femixer.kernels.triton_launch import target_of

# Channels of a key, in half precision where scores decay.
WIDEST_DECAYING = 64


def refuse(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, *rest: Any
) -> str | None:
    seen = Visibility(*rest[:5])
    if looks_ahead(seen):
        return "scores that decay towards later keys are read by torch's attention, and gated afterwards"
    if seen.decays and q.dtype != torch.float32:
        # They would spill registers.
        if target_of(q).startswith("gfx"):
            return "scores that decay are read in float32 on AMD's GPUs, and gated afterwards"
        if q.shape[3] > WIDEST_DECAYING:
            return f"scores that decay are read in float32 if keys have more than {WIDEST_DECAYING} channels"
    return triton_call.refuse(q, k, v, beta, seen, lam, gate)


def results(*arguments: Any) -> tuple[Tensor, ...]:
    """The gated read; internal: mean, free energy in float32 [B, T, H, D], log-normalizers and flags [B, H, T], tops of
    the key blocks [B, G, J + 1, D], nothing. Without beta there is no free energy, flags and tops: empty."""
    call = _call(*arguments)
    q, free = call.q, call.beta is not None
    read_shape = call.batch, call.rows, call.heads, call.width
    row_shape = call.batch, call.heads, call.rows
    return (
        q.new_empty(read_shape),
        q.new_empty(read_shape),
        q.new_empty(read_shape if free else 0, dtype=torch.float32),
        q.new_empty(row_shape, dtype=torch.float32),
        q.new_empty(row_shape if free else 0, dtype=torch.int8),
        q.new_empty(tops_shape(call) if free else 0, dtype=torch.float32),
        q.new_empty(0),
    )


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    found = results(*arguments)
    out, mean, free, log_z, flags, tops, _ = found
    read(_call(*arguments), mean, free, log_z, flags, tops, out)
    return found


READS_RESULTS = slice(1, None)


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    call = _call(*arguments)
    to_q, to_k, to_v, to_beta, to_bias, to_lam, to_gate = backward_of(
        call, grads[0], None, Found(*results[:5]), needed[6]
    )
    return to_q, to_k, to_v, to_beta, to_lam, to_gate, to_bias, None, None


def _call(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, *rest: Any
) -> Call:
    *seen, eps = rest
    return Call(q, k, v, beta, Visibility(*seen), q.shape[3] ** -0.5, Gates(lam, gate, eps))
