"""Decayed linear attention as Triton kernels, parallel over stretches of chunks: four launches forward, five and a sum
backward, one for a single token. See triton_states.py, triton_forward.py and triton_backward.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from femixer.kernels.decayed_linear import OPERATOR
from femixer.kernels.decayed_linear.triton_backward import query_gradients
from femixer.kernels.decayed_linear.triton_chunks import KEYS
from femixer.kernels.decayed_linear.triton_forward import read, read_again, step
from femixer.kernels.decayed_linear.triton_keys import key_gradients
from femixer.kernels.decayed_linear.triton_states import carry, carry_back, sum_stretches
from femixer.kernels.triton_launch import all_registers, launch, target_of

# Loops there know `disable_licm`, and its compiler takes sums along tokens (that of 3.5 and 3.6 ends the process).
OLDEST, VERSION = (3, 7), tuple(map(int, triton.__version__.split(".")[:2]))
WIDEST = 128
# Value channels at a time.
VALUES = 16
# Rows of a state that a program on an A100 walks on with at a time, for want of registers; elsewhere all.
ROWS = 16
WARPS = 4
# Programs that a launch has if the sequences are long enough: some for every place that the largest GPUs have for one.
PROGRAMS = 1024
# Chunks of a stretch at most: sums over them are rounded as often.
LONGEST = 32
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
    if VERSION < OLDEST:
        return f"it needs triton {OLDEST[0]}.{OLDEST[1]} or later, not {triton.__version__}"
    kinds = {x.dtype for x in (given.q, given.k, given.gate, given.v) if x is not None}
    if not kinds <= set(KINDS):
        return f"it takes float32, bfloat16 and float16, not {', '.join(sorted(map(str, kinds)))}"
    for name, width in (("key", given.k.shape[3]), ("value", given.v.shape[3])):
        if width > WIDEST:
            return f"{name} heads of {width} channels are too wide, {WIDEST} are the most"
    return "q is empty" if not given.q.numel() else None


class Plan(NamedTuple):
    """Sizes of a call: B G rows of T tokens in N stretches of some chunks of C; widths rounded up; value channels at a
    time."""

    rows: int
    length: int
    stretches: int
    steps: int
    C: int
    BE: int
    BD: int
    R: int
    W: int
    shape: dict[str, int]
    flags: dict[str, Any]

    @property
    def tiles(self) -> dict[str, Any]:
        warps = WARPS if self.BE <= 64 else 2 * WARPS
        sizes = {"C": self.C, "BE": self.BE, "BD": self.BD, "R": self.R, "W": self.W}
        return {**sizes, "num_warps": warps, "num_stages": 1}

    @property
    def halved(self) -> Plan:
        """The same stretches in chunks of 16 tokens: with more, gradients take more registers than there are."""
        return self._replace(C=16, steps=self.steps * self.C // 16)

    @property
    def places(self) -> int:
        """For states: before the stretches and after the last, and one for every program that walks."""
        return self.rows * (self.stretches + 1 + (self.stretches if self.halved.steps > 1 else 0))

    @property
    def streams(self) -> int:
        """Of v alone, or of v and exp(beta v)."""
        return 2 if self.flags["ENERGETIC"] else 1

    def stored(self, states: int) -> int:
        """Bytes of some states for every row."""
        return 4 * self.rows * states * self.shape["E"] * (1 + self.streams * self.shape["D"])

    def passes(self, count: int) -> int:
        """Bytes of programs that pass over some [E, D] numbers of a state in every chunk: they lie in a cache."""
        return 4 * self.rows * triton.cdiv(self.length, self.C) * count * self.shape["E"] * self.shape["D"]

    def work(self, heads: int, *, scores: int = 0, streams: int = 0, states: int = 0, sums: int = 0) -> int:
        """Flops for every token of some heads: products of queries and keys in a chunk, of these with the streams, of
        queries with the state; and for every row of keys with the streams."""
        channels, width = self.shape["E"], self.shape["D"] * self.streams
        each = scores * self.C * channels + streams * self.C * width + states * channels * width
        return 2 * self.length * (heads * each + self.rows * sums * channels * width)

    def powers(self, heads: int, *, decays: int, channels: int, widths: int, states: int = 0, sums: int = 0) -> int:
        """Exponentials and logarithms for every token of some heads: of decays between tokens, for channels of keys and
        of values, and for [E, D] numbers of a state in every chunk; and of these for every row."""
        E, D = self.shape.values()
        between = self.C if self.W == 1 else 16 * E
        each = decays * between + channels * E + widths * D + states * E * D // self.C
        return self.length * (heads * each + self.rows * sums * (E + D + 6 * E * D // self.C))


def _bytes(operands: Any) -> int:
    """Of every tensor once."""
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in operands if isinstance(x, Tensor)}.values())


def walks_back(target: str) -> bool:
    """Whether gradients are walked through chunk by chunk: on an A100 `key_gradients` has no registers for it."""
    return target != "sm_80"


def _rounded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _plan(given: Inputs, backward: bool = False) -> Plan:
    """Registers decide: Triton puts all warps of an exact product along the tokens; each holds its second factor."""
    (batch, length), (groups, width), channels = given.q.shape[:2], given.v.shape[2:], given.k.shape[3]
    walks = not backward or walks_back(target_of(given.q))
    chunk = 16 if length <= 16 or not walks else 32
    chunks = triton.cdiv(length, chunk)
    steps = min(LONGEST, triton.cdiv(chunks, triton.cdiv(PROGRAMS, batch * groups))) if walks else 1
    flags = {
        "ENERGETIC": given.beta is not None,
        # AMD's compiler has no product of three parts; its own of float32 is exact.
        "PRECISION": "tf32x3" if target_of(given.q).startswith("sm_") else "ieee",
    }
    return Plan(
        batch * groups,
        length,
        triton.cdiv(chunks, steps),
        steps,
        chunk,
        _rounded(channels),
        VALUES,
        ROWS if target_of(given.q) == "sm_80" else _rounded(channels),
        _rounded(channels) if given.per_channel else 1,
        {"E": channels, "D": width},
        flags,
    )


class States(NamedTuple):
    """The decay of every stretch [B G N, E]; log weights that they add, and the states, as triton_states says."""

    decay: Tensor
    added: Tensor
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
    chunks = triton.cdiv(plan.length, plan.C)
    stateful = given.sums is not None or given.keep or chunks > 1
    states = _states(given, plan, last, last_top) if stateful else None
    (q, k, gate, v, beta, marks), strides = _operands(given)
    ln, average, energy = (log_total,) * 3 if states is None else states[2:]
    heads = q.shape[0] * q.shape[2]
    again = torch.empty(heads * chunks, dtype=torch.int32, device=q.device)
    tokens = q, k, gate, v, beta, marks, mean, free, log_total, again
    operands = *tokens[:6], ln, average, energy, *tokens[6:], plan.length, plan.stretches, plan.steps
    sizes = q.shape[2], v.shape[2], *given.parts, int(given.exclusive)
    registers = all_registers(target_of(q)) if plan.BE <= 32 else {}
    blocks, repeats = triton.cdiv(plan.shape["D"], VALUES), q.shape[2] // v.shape[2]
    loaded = (3 + blocks) * _bytes((q, gate)) + (repeats + 1) * _bytes((k, v))
    if stateful:
        loaded += plan.passes((2 * plan.streams - 1) * repeats + 2 * plan.streams)
    work = {
        "moved": _bytes(tokens) + (plan.stored(2 * plan.stretches) if stateful else 0),
        "loaded": loaded,
        "flops": plan.work(heads, scores=1, streams=1, states=int(stateful), sums=int(stateful)),
        "exponentials": plan.powers(heads, decays=1, channels=2, widths=8, states=int(stateful), sums=int(stateful)),
    }
    for kernel in (read, read_again):
        again_only = kernel is read_again  # which finds nothing to do, as a rule
        tiles = {**plan.tiles, "num_warps": _readers(plan, target_of(q), again_only)}
        launch(
            kernel,
            (plan.stretches * plan.rows,),
            *(*operands, *sizes, *strides),
            exact=True,
            STATE=stateful,
            **({"moved": _bytes((again,))} if again_only else work),
            **plan.shape,
            **plan.flags,
            **tiles,
            **registers,
        )


def _readers(plan: Plan, target: str, again: bool) -> int:
    """Warps of a reader. A product of 32 rows has work for two of NVIDIA's; what spills decides."""
    width = plan.BE
    if target == "sm_80" or (again and plan.W == 1 and target in ("sm_89", "sm_120")):
        return WARPS if width <= 32 else 2 * WARPS
    if target.startswith("sm_") and not again and width <= 32:
        return WARPS // 2
    return WARPS if width <= 64 else 2 * WARPS


def _read_token(given: Inputs, plan: Plan, found: tuple[Tensor, ...]) -> None:
    (q, k, gate, v, beta, marks), strides = _operands(given)
    mean, _, _, last, last_top, _ = found
    first, top = (mean, mean) if given.sums is None or given.top is None else (given.sums, given.top)
    last, last_top = (last, last_top) if given.keep else (mean, mean)
    flags = {name: value for name, value in plan.flags.items() if name != "PRECISION"}
    operands = q, k, gate, v, beta, marks, first.contiguous(), top.contiguous(), *found[:3], last, last_top
    launch(
        step,
        (q.shape[0] * v.shape[2], triton.cdiv(v.shape[3], VALUES)),
        *operands,
        *(q.shape[2], v.shape[2], *given.parts),
        *(stride for i, stride in enumerate(strides) if i % 3 != 1),
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
        **all_registers(target_of(q)),
    )


def _states(given: Inputs, plan: Plan, last: Tensor, last_top: Tensor) -> States:
    (_, k, gate, v, beta, marks), strides = _operands(given)
    channels, width = plan.shape.values()

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=v.device)

    n = plan.stretches
    decay, added, ln = empty(plan.rows * n, channels), empty(plan.places, channels), empty(plan.places, channels)
    average = empty(plan.places, channels, width)
    energy = average if given.beta is None else torch.empty_like(average)
    states = States(decay, added, ln, average, energy)
    tokens = k, gate, v, beta, marks
    launch(
        sum_stretches,
        (n * plan.rows,),
        *(*tokens, decay, added, average, energy, plan.length, n, plan.steps, v.shape[2], *given.parts),
        *strides[3:],
        moved=_bytes(tokens) + plan.stored(n),
        loaded=_bytes(tokens) + plan.passes(2 * plan.streams),
        exact=True,
        flops=plan.work(0, sums=1),
        exponentials=plan.powers(0, decays=0, channels=0, widths=0, sums=1),
        **plan.shape,
        **plan.flags,
        **plan.tiles,
        **all_registers(target_of(k)),
    )
    first, top = (added, added) if given.sums is None or given.top is None else (given.sums, given.top)
    last, last_top = (last, last_top) if given.keep else (added, added)
    launch(
        carry,
        (plan.rows, triton.cdiv(width, VALUES)),
        *(*states, first.contiguous(), top.contiguous(), last, last_top, n),
        moved=plan.stored(2 * n + 1),
        exponentials=6 * plan.rows * n * channels * width,
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


def _carry_back(
    given: Inputs, plan: Plan, states: States, to_states: tuple[Tensor, ...], to_last: Tensor | None
) -> Tensor | None:
    """Gradients of all states, from what chunks gave theirs; the gradient of the sums that were given, if any were."""
    to_sums = None if given.sums is None else torch.empty_like(given.sums, memory_format=torch.contiguous_format)
    nobody, width = states.ln, plan.shape["D"]
    top = nobody if given.top is None else given.top.contiguous()
    launch(
        carry_back,
        (plan.rows, triton.cdiv(width, VALUES)),
        *(states.decay, states.ln, states.energy, *to_states, top, nobody if to_last is None else to_last),
        *(nobody if to_sums is None else to_sums, plan.stretches),
        moved=plan.stored(3 * plan.stretches + 2),
        exponentials=2 * plan.rows * plan.stretches * plan.shape["E"] * width,
        BE=plan.BE,
        BD=VALUES,
        STATE=to_sums is not None,
        ENERGETIC=given.beta is not None,
        BY_LAST=to_last is not None,
        num_warps=WARPS,
        **plan.shape,
    )
    return to_sums


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    given, plan = Inputs(*arguments), _plan(Inputs(*arguments), backward=True)
    (q, k, gate, v, beta, marks), strides = _operands(given)
    mean, free, log_total = results[:3]
    batch, heads, groups, n = q.shape[0], q.shape[2], v.shape[2], plan.stretches
    channels, width = plan.shape.values()

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    # Anything for what nobody used.
    to = [mean if g is None else g.contiguous() for g in grads[:4]]
    by_last = given.keep and grads[3] is not None
    stateful = given.sums is not None or by_last or plan.length > plan.halved.C
    states = _states(given._replace(keep=False), plan, mean, mean) if stateful else None
    plan = plan.halved
    before, to_states, read_n, to_sums = (mean,) * 3, (mean,) * 3, mean, None
    if states is not None:
        before, read_n = states[2:], torch.empty_like(states.ln)
        to_states = torch.empty_like(read_n), torch.empty_like(states.average), torch.empty_like(states.energy)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_gate = None if given.gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=q.device)
    flow = empty(*k.shape) if given.per_channel else empty(*k.shape[:3])

    tokens, read_back = (q, k, gate, v, beta, marks), (mean, free, log_total, *to[:3])
    numbers = plan.length, n, plan.steps, *given.parts, int(grads[2] is not None), int(given.exclusive), *strides
    options = {**plan.shape, **plan.flags, **plan.tiles, "num_warps": 8, "H": heads, "G": groups, "STATE": stateful}
    options |= {"BY_MEAN": grads[0] is not None, "BY_FREE": grads[1] is not None}
    registers = all_registers(target_of(q)) if given.per_channel and target_of(q) == "sm_80" else {}
    slices, repeats, all_heads = triton.cdiv(channels, KEYS.value), heads // groups, batch * heads
    stored, stream = plan.stored(n) if stateful else 0, plan.streams if stateful else 0
    launch(
        query_gradients,
        (n * plan.rows,),
        *(*tokens, *before, *read_back, read_n, *to_states[1:], d_q, flow, *numbers),
        moved=_bytes((*tokens, *read_back, d_q, flow)) + 3 * stored,
        loaded=(3 + slices) * _bytes(read_back)
        + 2 * _bytes((q, gate))
        + (repeats + 1) * _bytes((k, v))
        + plan.passes((4 * stream - 1) * repeats + 2 * stream),
        exact=True,
        flops=plan.work(all_heads, scores=1, streams=1, states=stream and 2, sums=stream and 1),
        exponentials=plan.powers(
            all_heads, decays=1, channels=2, widths=3 + slices, states=stream and 2, sums=stream and 1
        ),
        **registers,
        **options,
    )
    if states is not None:
        to_sums = _carry_back(given, plan, states, (read_n, *to_states), to[3] if by_last else None)
    programs = n * plan.rows
    sums = empty(programs, plan.C, channels), empty(programs, plan.C, width), empty(programs, width)
    found = d_k, flow if d_gate is None else d_gate, d_v, *sums, empty(programs, channels)
    launch(
        key_gradients,
        (programs,),
        *(*tokens, *before, *read_back, *to_states, flow, *found, *numbers),
        moved=_bytes((*tokens, *read_back, flow, *found)) + 4 * stored,
        loaded=4 * _bytes(read_back)
        + 3 * _bytes((q, gate))
        + (repeats + 1) * _bytes((k, v))
        + slices * (_bytes((v,)) + 2 * 4 * plan.rows * plan.length * width)
        + plan.passes(((2 * stream + 2) * repeats + stream + 1) if stateful else 0),
        exact=True,
        flops=plan.work(all_heads, scores=2, streams=2, states=stream and 1, sums=stream and 2),
        exponentials=plan.powers(all_heads, decays=2, channels=3, widths=5 + slices, states=stream and 3, sums=0),
        WALK=stateful and walks_back(target_of(q)),
        **options,
    )
    d_beta = None if given.beta is None else sums[2].view(batch, groups, n, width).sum((0, 2)).to(given.beta.dtype)
    return d_q, d_k, d_gate, d_v, d_beta, None, to_sums, None
