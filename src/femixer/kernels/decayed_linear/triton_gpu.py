"""Decayed linear attention as Triton kernels, parallel over the chunks: three launches forward, five and a sum backward,
one for a single token. The kernels are in triton_forward.py and triton_backward.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from femixer.kernels.decayed_linear import OPERATOR
from femixer.kernels.decayed_linear import triton_forward as kernels
from femixer.kernels.reading import state_dtype
from femixer.kernels.triton_launch import launch, target_of

WIDEST = 128
KINDS = (torch.float32, torch.bfloat16, torch.float16)


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
    def per_channel(self) -> bool:
        return self.gate is not None and self.gate.shape[3] > 1


def refuse(*arguments: Any) -> str | None:
    given = Inputs(*arguments)
    kinds = {x.dtype for x in (given.q, given.k, given.gate, given.v) if x is not None}
    if not kinds <= set(KINDS):
        return f"it takes float32, bfloat16 and float16, not {', '.join(sorted(map(str, kinds)))}"
    for name, width in (("key", given.k.shape[3]), ("value", given.v.shape[3])):
        if width > WIDEST:
            return f"{name} heads of {width} channels are too wide, {WIDEST} are the most"
    return "q is empty" if not given.q.numel() else None


class Plan(NamedTuple):
    """Sizes of a call: tokens T in N chunks of C; widths rounded up; value channels at a time."""

    length: int
    chunks: int
    C: int
    BE: int
    BD: int
    W: int
    shape: dict[str, int]
    flags: dict[str, Any]
    warps: int

    @property
    def tiles(self) -> dict[str, Any]:
        return {"C": self.C, "BE": self.BE, "BD": self.BD, "W": self.W, "num_warps": self.warps}


def _rounded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _plan(given: Inputs) -> Plan:
    length, width, target = given.q.shape[1], given.v.shape[3], target_of(given.q)
    channels, groups = given.k.shape[3], given.v.shape[2]
    chunk, tile, warps = _tile(_rounded(channels), given.per_channel)
    flags = {
        "GATED": given.gate is not None,
        "MARKED": given.marks is not None,
        "ENERGETIC": given.beta is not None,
        # AMD's compiler has no product of three parts; its own of float32 is exact.
        "PRECISION": "tf32x3" if target.startswith("sm_") else "ieee",
    }
    return Plan(
        length,
        triton.cdiv(length, chunk),
        chunk,
        _rounded(channels),
        min(_rounded(width), tile),
        _rounded(channels) if given.per_channel else 1,
        {"G": groups, "E": channels, "D": width},
        flags,
        warps,
    )


def _tile(channels: int, per_channel: bool) -> tuple[int, int, int]:
    """Tokens of a chunk, value channels at a time, warps."""
    if per_channel:
        return 32, 32, 4
    return (64, 32, 8) if channels <= 64 else (32, 32, 8)


class States(NamedTuple):
    """Per chunk: log weights that it adds and its decay [B, G, N, E]; and the states before the chunks and after the
    last, as triton_forward says."""

    added: Tensor
    decay: Tensor
    ln: Tensor
    average: Tensor
    energy: Tensor


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, time and head."""
    return [step for x in tensors for step in x.stride()[:3]]


def _operands(given: Inputs) -> tuple[list[Tensor], list[int]]:
    """q, k, gate, v, beta, marks as the kernels read them, anything for what is not there; strides of q, k, v, gate."""
    q, k, v = (_rows(x) for x in (given.q, given.k, given.v))
    gate = k if given.gate is None else _rows(given.gate)
    beta = v if given.beta is None else given.beta.contiguous()
    marks = v if given.marks is None else given.marks.contiguous()
    return [q, k, gate, v, beta, marks], _strides(q, k, v, gate)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = Inputs(*arguments)
    found = results(*arguments)
    plan = _plan(given)
    mean, free, log_total, last, last_top, _ = found
    stateful = given.sums is not None or given.keep or plan.chunks > 1
    states = _states(given, plan, last, last_top) if stateful else None
    (q, k, gate, v, beta, marks), strides = _operands(given)
    ln, average, energy = (log_total,) * 3 if states is None else states[2:]
    heads = q.shape[2]
    programs = plan.chunks * q.shape[0] * heads
    again = torch.empty(programs, dtype=torch.int32, device=q.device)
    operands = q, k, gate, v, beta, marks, ln, average, energy, mean, free, log_total, again, plan.length, plan.chunks
    options = {"H": heads, "STATE": stateful, "EXCLUSIVE": given.exclusive, **plan.shape, **plan.flags, **plan.tiles}
    for kernel in (kernels.read, kernels.read_again):
        launch(kernel, (programs,), *operands, *strides, **options)
    return found


def results(*arguments: Any) -> tuple[Tensor, ...]:
    """As the operator has them; no head is read again."""
    found = OPERATOR.results(*arguments)
    return *found[:5], found[5].new_empty(0)


def _states(given: Inputs, plan: Plan, last: Tensor, last_top: Tensor) -> States:
    (_, k, gate, v, beta, marks), strides = _operands(given)
    batch, groups, channels, width = k.shape[0], *plan.shape.values()

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, groups, *shape, dtype=torch.float32, device=v.device)

    n = plan.chunks
    added, decay, ln = empty(n, channels), empty(n, channels), empty(n + 1, channels)
    average = empty(n + 1, channels, width)
    energy = average if given.beta is None else torch.empty_like(average)
    states = States(added, decay, ln, average, energy)
    options = {**plan.shape, **plan.flags, **plan.tiles}
    operands = k, gate, v, beta, marks, added, decay, average, energy, plan.length, n
    launch(kernels.sum_chunks, (n * batch * groups,), *operands, *strides[3:], **options)
    first, top = (added, added) if given.sums is None or given.top is None else (given.sums, given.top)
    last, last_top = (last, last_top) if given.keep else (added, added)
    launch(
        kernels.carry,
        (triton.cdiv(width, 16), batch * groups),
        *(*states, first.contiguous(), top.contiguous(), last, last_top, n),
        **{"E": channels, "D": width, "BE": plan.BE, "BD": 16, "STATE": given.sums is not None},
        **{"ENERGETIC": given.beta is not None, "KEEP": given.keep, "num_warps": 4},
    )
    return states
