"""Decayed linear attention as Triton kernels, parallel over the chunks: four launches forward, five and a sum backward,
one for a single token. The kernels are in triton_forward.py and triton_backward.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from femixer.kernels.decayed_linear import OPERATOR
from femixer.kernels.decayed_linear import triton_backward as gradients
from femixer.kernels.decayed_linear import triton_forward as kernels
from femixer.kernels.triton_launch import all_registers, launch, target_of

WIDEST = 128
# Value channels at a time.
VALUES = 16
WARPS = 4
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

    @property
    def parts(self) -> tuple[int, int]:
        """Whether there are gates and marks, as numbers for kernels."""
        return int(self.gate is not None), int(self.marks is not None)


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

    @property
    def tiles(self) -> dict[str, Any]:
        warps = WARPS if self.BE <= 64 else 2 * WARPS
        return {"C": self.C, "BE": self.BE, "BD": self.BD, "W": self.W, "num_warps": warps, "num_stages": 1}

    @property
    def streams(self) -> int:
        """Of v alone, or of v and exp(beta v)."""
        return 2 if self.flags["ENERGETIC"] else 1

    def products(self, rows: int, stateful: bool) -> int:
        """Flops of the scores of a chunk, of their products with the streams, and of those with the state."""
        channels, width = self.shape["E"], self.shape["D"] * self.streams
        between = 2 * self.C * (channels + width)
        return rows * self.length * (between + (2 * channels * width if stateful else 0))

    def powers(self, rows: int) -> int:
        """Exponentials and logarithms of the decays, the streams, the state's rows and the results."""
        channels, width = self.shape["E"], self.shape["D"]
        decays = self.C if self.W == 1 else 16 * channels
        return rows * self.length * (decays + 2 * channels + 8 * width + channels * width // self.C)


def _bytes(operands: Any) -> int:
    """Of every tensor once."""
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in operands if isinstance(x, Tensor)}.values())


def _rounded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _plan(given: Inputs, backward: bool = False) -> Plan:
    """Registers decide: Triton puts all warps of an exact product along the tokens; each holds its second factor."""
    length, width, target = given.q.shape[1], given.v.shape[3], target_of(given.q)
    channels = given.k.shape[3]
    chunk = 16 if backward or length <= 16 else 32
    flags = {
        "ENERGETIC": given.beta is not None,
        # AMD's compiler has no product of three parts; its own of float32 is exact.
        "PRECISION": "tf32x3" if target.startswith("sm_") else "ieee",
    }
    return Plan(
        length,
        triton.cdiv(length, chunk),
        chunk,
        _rounded(channels),
        VALUES,
        _rounded(channels) if given.per_channel else 1,
        {"E": channels, "D": width},
        flags,
    )


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
    # Of the types that they have where they are there, so that both are one kernel.
    gate = torch.empty(1, 1, 1, 1, dtype=torch.float32, device=v.device) if given.gate is None else _rows(given.gate)
    beta = v if given.beta is None else given.beta.contiguous()
    marks = v.new_empty(1, dtype=torch.int8) if given.marks is None else given.marks.contiguous()
    return [q, k, gate, v, beta, marks], _strides(q, k, v, gate)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    found = results(*arguments)
    _read(Inputs(*arguments), found)
    return found


def results(*arguments: Any) -> tuple[Tensor, ...]:
    """As the operator has them, without the last."""
    *found, _ = OPERATOR.results(*arguments)
    return *found, found[0].new_empty(0)


def _read(given: Inputs, found: tuple[Tensor, ...]) -> None:
    plan = _plan(given)
    if plan.length == 1:
        _read_token(given, plan, found)
        return
    mean, free, log_total, last, last_top, _ = found
    stateful = given.sums is not None or given.keep or plan.chunks > 1
    states = _states(given, plan, last, last_top) if stateful else None
    (q, k, gate, v, beta, marks), strides = _operands(given)
    ln, average, energy = (log_total,) * 3 if states is None else states[2:]
    programs = plan.chunks * q.shape[0] * q.shape[2]
    again = torch.empty(programs, dtype=torch.int32, device=q.device)
    read = ln, average, energy, mean, free, log_total, again, plan.length, plan.chunks
    sizes = q.shape[2], v.shape[2], *given.parts, int(given.exclusive)
    # A product of 32 rows has work for two of NVIDIA's warps; what spills decides.
    few_warps = plan.BE <= 64 and target_of(q).startswith("sm_")
    few = 4 if plan.BE == 64 else 2
    registers = all_registers(target_of(q)) if plan.BE <= 32 else {}
    for kernel in (kernels.read, kernels.read_again):
        operands = q, k, gate, v, beta, marks, *read, *sizes, *strides
        again_only = kernel is kernels.read_again  # which finds nothing to do, as a rule
        tiles = plan.tiles if again_only or not few_warps else {**plan.tiles, "num_warps": few}
        launch(
            kernel,
            (programs,),
            *operands,
            moved=4 * programs if again_only else _bytes(operands),
            exact=True,
            flops=0 if again_only else plan.products(q.shape[0] * q.shape[2], stateful),
            exponentials=0 if again_only else plan.powers(q.shape[0] * q.shape[2]),
            STATE=stateful,
            **plan.shape,
            **plan.flags,
            **tiles,
            **registers,
        )


def _read_token(given: Inputs, plan: Plan, found: tuple[Tensor, ...]) -> None:
    (q, k, gate, v, beta, marks), strides = _operands(given)
    mean, _, _, last, last_top, _ = found
    first, top = (mean, mean) if given.sums is None or given.top is None else (given.sums, given.top)
    last, last_top = (last, last_top) if given.keep else (mean, mean)
    flags = {name: value for name, value in plan.flags.items() if name != "PRECISION"}
    operands = q, k, gate, v, beta, marks, first.contiguous(), top.contiguous(), *found[:3], last, last_top
    launch(
        kernels.step,
        (q.shape[0] * v.shape[2], triton.cdiv(v.shape[3], VALUES)),
        *operands,
        *(q.shape[2], v.shape[2], *given.parts),
        *(step for i, step in enumerate(strides) if i % 3 != 1),
        moved=_bytes(operands),
        exponentials=6 * q.shape[0] * q.shape[2] * plan.shape["E"] * plan.shape["D"],
        BE=plan.BE,
        BD=VALUES,
        W=plan.W,
        STATE=given.sums is not None,
        EXCLUSIVE=given.exclusive,
        KEEP=given.keep,
        num_warps=WARPS,
        **plan.shape,
        **flags,
    )


def _states(given: Inputs, plan: Plan, last: Tensor, last_top: Tensor) -> States:
    (_, k, gate, v, beta, marks), strides = _operands(given)
    batch, groups, channels, width = k.shape[0], v.shape[2], *plan.shape.values()

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, groups, *shape, dtype=torch.float32, device=v.device)

    n = plan.chunks
    added, decay, ln = empty(n, channels), empty(n, channels), empty(n + 1, channels)
    average = empty(n + 1, channels, width)
    energy = average if given.beta is None else torch.empty_like(average)
    states = States(added, decay, ln, average, energy)
    options = {**plan.shape, **plan.flags, **plan.tiles}
    operands = k, gate, v, beta, marks, added, decay, average, energy, plan.length, n
    rows = batch * groups
    launch(
        kernels.sum_chunks,
        (n * rows,),
        *(*operands, groups, *given.parts),
        *strides[3:],
        moved=_bytes(operands),
        exact=True,
        flops=2 * rows * plan.length * channels * width * plan.streams,
        exponentials=rows * (plan.length * (channels + width) + n * channels * width),
        **options,
    )
    first, top = (added, added) if given.sums is None or given.top is None else (given.sums, given.top)
    last, last_top = (last, last_top) if given.keep else (added, added)
    launch(
        kernels.carry,
        (batch * groups, triton.cdiv(width, VALUES)),
        *(*states, first.contiguous(), top.contiguous(), last, last_top, n),
        moved=2 * _bytes(states),
        exponentials=6 * rows * n * channels * width,
        E=channels,
        D=width,
        BE=plan.BE,
        BD=VALUES,
        STATE=given.sums is not None,
        ENERGETIC=given.beta is not None,
        KEEP=given.keep,
        num_warps=WARPS,
    )
    return states


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    given, plan = Inputs(*arguments), _plan(Inputs(*arguments), backward=True)
    (q, k, gate, v, beta, marks), strides = _operands(given)
    mean, free, log_total = results[:3]
    batch, heads, n = q.shape[0], q.shape[2], plan.chunks
    groups, channels, width = v.shape[2], *plan.shape.values()
    # Anything for what nobody used.
    to = [mean if g is None else g.contiguous() for g in grads[:4]]
    by = {"BY_MEAN": grads[0] is not None, "BY_FREE": grads[1] is not None}
    numbers = plan.length, n, heads, groups, *given.parts, int(grads[2] is not None)
    read = mean, free, log_total, *to[:3]
    options = {**by, **plan.shape, **plan.flags, **plan.tiles, "num_warps": 8}
    by_last = given.keep and grads[3] is not None
    stateful = given.sums is not None or by_last or n > 1
    states, to_states, to_sums = None, (mean,) * 3, None
    if stateful:
        states = _states(given._replace(keep=False), plan, mean, mean)
        read_n, to_n = torch.empty_like(states.ln), torch.empty_like(states.ln)
        to_average, to_energy = torch.empty_like(states.average), torch.empty_like(states.energy)
        to_states = to_n, to_average, to_energy
        operands = q, gate, beta, marks, states.ln, states.energy, *read, read_n, to_average, to_energy
        steps = *numbers, *strides[:3], *strides[9:]
        launch(
            gradients.read_gradients,
            (n * batch * groups,),
            *(*operands, *steps),
            moved=_bytes(operands),
            exact=True,
            flops=2 * batch * heads * plan.length * channels * width * plan.streams,
            exponentials=batch * heads * plan.length * (channels + width),
            **{**options, "num_warps": 8 if plan.BE > 32 else 4},
        )
        to_sums = None if given.sums is None else torch.empty_like(given.sums, memory_format=torch.contiguous_format)
        top = mean if given.top is None else given.top.contiguous()
        kept = states.decay, states.ln, states.energy
        launch(
            gradients.carry_back,
            (batch * groups, triton.cdiv(width, VALUES)),
            *(*kept, read_n, *to_states, top, to[3], mean if to_sums is None else to_sums, n),
            moved=_bytes(kept) + 2 * _bytes(to_states),
            exponentials=2 * batch * groups * n * channels * width,
            E=channels,
            D=width,
            BE=plan.BE,
            BD=VALUES,
            STATE=to_sums is not None,
            ENERGETIC=given.beta is not None,
            BY_LAST=by_last,
            num_warps=WARPS,
        )
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_gate = None if given.gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=q.device)
    # Sums of parts, in float32.
    sum_q, sum_k, sum_gate, sum_v = (
        x if x is None or x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
        for x in (d_q, d_k, d_gate, d_v)
    )
    sum_beta = torch.empty(batch, groups, n, width, dtype=torch.float32, device=q.device)
    before = (mean,) * 3 if states is None else states[2:]
    operands = q, k, gate, v, beta, marks, *before, *read, *to_states
    to_gate = (sum_k, sum_k) if d_gate is None else (d_gate, sum_gate)
    found = d_q, d_k, to_gate[0], d_v, sum_q, sum_k, to_gate[1], sum_v, sum_beta
    # Counts of heads as constants: with numbers in their place addresses take more registers than there are.
    options |= {"H": heads, "G": groups, "STATE": stateful, "ROUNDED": sum_v is not d_v}
    launch(
        gradients.token_gradients,
        (n * batch * groups,),
        *(*operands, *found, *numbers[:2], *numbers[4:], int(given.exclusive), *strides),
        moved=_bytes((*operands, *found)),
        exact=True,
        flops=3 * plan.products(batch * heads, stateful),
        exponentials=2 * plan.powers(batch * heads),
        **options,
    )
    d_beta = None if given.beta is None else sum_beta.sum((0, 2), dtype=torch.float32).to(given.beta.dtype)
    return d_q, d_k, d_gate, d_v, d_beta, None, to_sums, None
