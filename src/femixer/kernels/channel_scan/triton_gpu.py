"""The scan per channel by chunks of tokens: their summaries, what came before each, and the read inside of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.channel_scan import triton_kernels as kernels
from femixer.kernels.reading import state_dtype
from femixer.kernels.triton_launch import all_registers, target_of
from femixer.kernels.triton_tokens import Chunks, empty_read, rows, unserved


def refuse(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> str | None:
    return unserved(key, gate, v, beta) if v.shape[1] else "there is no token"


def results(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    mean, free, log_total = empty_read(v, (0,) if beta is None else v.shape)
    last = v.new_empty(3, v.shape[0], v.shape[2], dtype=state_dtype(v.device))
    return mean, free, log_total, last, Chunks(*v.shape).summaries(5, v.device)


def _operands(
    key: Tensor | None, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None
) -> tuple[list[Tensor], tuple[int, ...], dict[str, bool]]:
    """What all kernels take first: tensors, with any other for those that are not there; steps and whether there are
    marks; which of the others there are."""
    (v, v_step) = rows(v)
    (key_, key_step), (gate_, gate_step) = ((v, v_step) if x is None else rows(x) for x in (key, gate))
    marks_ = v.new_empty(1, dtype=torch.int8) if marks is None else marks.contiguous()
    tensors = [key_, gate_, v, v if beta is None else beta.contiguous(), marks_]
    steps = key_step, gate_step, v_step, int(marks is not None)
    there = {"KEY": key, "GATE": gate, "BETA": beta}
    return tensors, steps, {f"HAS_{name}": x is not None for name, x in there.items()}


def forward(
    key: Tensor | None,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    tensors, steps, there = _operands(key, gate, v, beta, marks)
    start: dict[str, Any] = {"HAS_STATE": state is not None}
    made = mean, free, log_total, last, carry = results(key, gate, v, beta, marks, state)
    state = log_total if state is None else state.contiguous()
    chunks = Chunks(*v.shape)
    if chunks.count > 1:
        chunks.walk(kernels.summarise, *tensors, carry, *steps, **there, exponentials=4 * v.numel())
        chunks.carry(kernels.carry, carry, tensors[3], state, HAS_BETA=there["HAS_BETA"], **start)
    operands = *tensors, state, carry, mean, free if beta is not None else mean, log_total, last
    start |= all_registers(target_of(v))
    chunks.walk(kernels.read, *operands, *steps, **there, **start, exponentials=4 * v.numel())
    return made


Arguments = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]


def backward(
    grads: tuple[Tensor | None, ...], arguments: Arguments, results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    key, gate, v, beta, marks, state = arguments
    mean, free, log_total, _, carry = results
    tensors, steps, there = _operands(key, gate, v, beta, marks)
    there["HAS_STATE"] = state is not None
    own = [log_total if g is None else g.contiguous() for g in grads[:4]]
    asked = {"HAS_TO_MEAN": grads[0] is not None, "HAS_TO_FREE": grads[1] is not None and beta is not None}
    steps = *steps, int(grads[2] is not None)
    end = {"HAS_TO_LAST": grads[3] is not None}
    chunks = Chunks(*v.shape)
    maps = chunks.summaries(7, v.device)
    start = log_total if state is None else state.contiguous()
    operands = [*tensors, start, carry, mean, mean if beta is None else free, log_total, *own[:3], maps]
    if chunks.count > 1:
        chunks.walk(kernels.summarise_back, *operands, *steps, **there, **asked, exponentials=2 * v.numel())
        chunks.carry(kernels.carry_back, maps, own[3], **end)
    to_key, to_gate, to_v = (None if x is None else torch.empty_like(mean, dtype=x.dtype) for x in (key, gate, v))
    to_beta = None if beta is None else log_total.new_empty(v.shape[0], chunks.count, v.shape[2])
    to_state = None if state is None else torch.empty_like(start)
    found = [own[3], *(log_total if x is None else x for x in (to_key, to_gate, to_v, to_beta, to_state))]
    chunks.walk(kernels.gradients, *operands, *found, *steps, **there, **asked, **end, exponentials=2 * v.numel())
    if beta is not None and to_beta is not None:
        to_beta = to_beta.sum((0, 1)).to(beta.dtype)
    return to_key, to_gate, to_v, to_beta, None, to_state
