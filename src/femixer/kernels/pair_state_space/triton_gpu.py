"""The read over pairs on GPUs: a program per head and chunk of time, three launches, one for short sequences.

The backward saves no modes: it computes the chunks again and holds the states of all tokens, which are smaller than the
values, for its own time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from femixer.kernels.pair_state_space import triton_kernels as kernels
from femixer.kernels.triton_launch import HALF_OR_SINGLE, launch

# Tokens of a chunk.
CHUNK = 32
MOST_MODES, WIDEST = 64, 256
READS_RESULTS = slice(0, 4)


def refuse(*arguments: Any) -> str | None:
    v, modes = arguments[5], arguments[0].shape[3]
    if v.dtype not in HALF_OR_SINGLE:
        return f"it takes float32, bfloat16 and float16, not {v.dtype}"
    if not v.shape[1]:
        return "there is no token"
    if v.shape[3] > WIDEST:
        return f"heads of {v.shape[3]} channels are too wide, {WIDEST} are the most"
    return None if modes <= MOST_MODES else f"{modes} modes are too many, {MOST_MODES} are the most"


class Problem(NamedTuple):
    """The operator's arguments, contiguous; what is missing is stood in for by v, which is not read then."""

    gate: Tensor
    write: Tensor
    read: Tensor
    spread: Tensor
    gather: Tensor
    v: Tensor
    beta: Tensor
    marks: Tensor
    sums: Tensor
    top: Tensor
    marked: int
    flags: dict[str, bool]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """B, T, H, N, D"""
        batch, length, heads, width = self.v.shape
        return batch, length, heads, self.gate.shape[3], width

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.v.shape[1], CHUNK)

    def options(self, *names: str) -> dict[str, Any]:
        modes, width = (triton.next_power_of_2(size) for size in self.shape[3:])
        flags = {name: self.flags[name] for name in names}
        return {
            "MODES": modes,
            "WIDTH": width,
            "CHUNK": CHUNK,
            **flags,
            "num_warps": min(8, max(1, modes * width // 128)),
        }


def _problem(arguments: tuple[Any, ...]) -> Problem:
    *tensors, exclusive = arguments
    given = [x.contiguous() if isinstance(x, Tensor) else x for x in tensors]
    flags = {"FREE": given[6] is not None, "INCLUSIVE": not exclusive}
    marked = int(given[7] is not None)
    given[7] = given[5].new_empty(1, dtype=torch.int8) if given[7] is None else given[7]
    names = Problem._fields[: len(given)]
    there: dict[str, Any] = {name: given[5] if x is None else x for name, x in zip(names, given, strict=True)}
    return Problem(**there, marked=marked, flags=flags)


def _work(p: Problem, passes: int = 1) -> dict[str, int]:
    """Exponentials: of every value and of every mode's gate. The products with spread and gather are not tensor-core
    products, they are too small."""
    batch, length, heads, modes, width = p.shape
    return {"exponentials": passes * batch * length * heads * (modes + width)}


def _states_before(p: Problem) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Before all chunks: sums [B, chunks, 3, H, N] and tops [B, chunks, H]; SLOWS and LAGS of the kernels."""
    batch, length, heads, modes, width = p.shape
    if p.chunks == 1:
        return p.sums, p.top, None
    new: dict[str, Any] = {"dtype": torch.float32, "device": p.v.device}
    sums = torch.empty(batch, p.chunks, 3, heads, modes, **new)
    tops, slows = torch.empty(2, batch, p.chunks, heads, **new)
    lags = torch.empty(batch, p.chunks, heads, modes, **new)
    sizes = length, heads, modes, width, p.chunks
    given = p.gate, p.write, p.spread, p.v, p.beta, p.marks, sums, tops, slows, lags, *sizes, p.marked
    launch(kernels.summarize, (p.chunks * batch, heads), *given, **p.options("FREE"), **_work(p))
    options = p.options("FREE")
    carried = sums, tops, slows, lags, p.sums, p.top, heads, modes, p.chunks
    launch(kernels.carry, (batch, heads), *carried, MODES=options["MODES"], FREE=options["FREE"], num_warps=1)
    return sums, tops, (slows, lags)


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    p = _problem(arguments)
    batch, length, heads, modes, width = p.shape
    sums, tops, _ = _states_before(p)
    mean, log_total = (torch.empty_like(p.v, dtype=torch.float32) for _ in range(2))
    free = torch.empty_like(mean) if p.flags["FREE"] else mean.new_empty(0, 0, 0, 0)
    last, last_top = torch.empty_like(p.sums), torch.empty_like(p.top)
    given = p.gate, p.write, p.read, p.spread, p.gather, p.v, p.beta, p.marks, sums, tops
    results = mean, free if p.flags["FREE"] else mean, log_total, last, last_top
    sizes = length, heads, modes, width, p.chunks, p.marked
    options = p.options("FREE", "INCLUSIVE")
    launch(kernels.read_chunks, (p.chunks * batch, heads), *given, *results, *sizes, **options, **_work(p))
    return mean, free, log_total, last, last_top if p.flags["FREE"] else p.top.clone()


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    p = _problem(arguments)
    batch, length, heads, modes, width = p.shape
    sums, tops, falls = _states_before(p)
    new: dict[str, Any] = {"dtype": torch.float32, "device": p.v.device}
    mean, free, log_total, last = results
    token_tops = torch.empty(batch, length, heads, **new)
    by = [mean if g is None else g.contiguous() for g in grads[:4]]
    flags = {"BY_MEAN": grads[0] is not None, "BY_FREE": grads[1] is not None}
    by_total = int(grads[2] is not None)
    read = mean, free if p.flags["FREE"] else mean, log_total, *by[:3]
    sizes = length, heads, modes, width, p.chunks
    back = torch.empty(batch, p.chunks, 3, heads, modes, **new)
    seen = torch.empty(batch, length, 3, heads, modes, **new)
    system = p.gate, p.write, p.read, p.spread, p.gather, p.v, p.beta, p.marks
    given = *system, sums, tops, token_tops, seen, *read, back, *sizes, p.marked, by_total
    options = p.options("FREE") | flags
    launch(kernels.adjoints, (p.chunks * batch, heads), *given, **options, **_work(p, passes=2))
    if falls is not None:
        carried = back, tops, *falls, token_tops[:, -1].contiguous(), by[3], heads, modes, p.chunks
        chosen = {"MODES": options["MODES"], "FREE": p.flags["FREE"], "BY_LAST": grads[3] is not None}
        launch(kernels.carry_back, (batch, heads), *carried, **chosen, num_warps=1)
    elif grads[3] is None:
        back.zero_()
    else:
        back.copy_(grads[3][:, None])
    return _gradients(p, (sums, tops, token_tops, seen, back), (*read, last), by_total, flags, needed)


def _gradients(
    p: Problem,
    states: tuple[Tensor, ...],
    read: tuple[Tensor, ...],
    by_total: int,
    flags: dict[str, bool],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    batch, length, heads, modes, width = p.shape
    new: dict[str, Any] = {"dtype": torch.float32, "device": p.v.device}
    to_gate, to_v = torch.empty_like(p.gate), torch.empty_like(p.v)
    amounts = torch.empty(2, heads, batch, length, modes, **new)
    matrices = torch.empty(2, batch, p.chunks, heads, modes * width, **new)
    to_beta, to_first = torch.empty(batch, p.chunks, heads, **new), torch.empty(batch, 3, heads, modes, **new)
    found = to_gate, *amounts, *matrices, to_v, to_beta, to_first
    # Modes side by side, as in gather: matrices of two layouts would take more registers than there are.
    spread = p.spread.mT.contiguous()
    given = p.gate, p.write, p.read, spread, p.gather, p.v, p.beta, p.marks, *states, *read
    sizes = length, heads, modes, width, p.chunks, batch, p.marked, by_total
    options = p.options("FREE", "INCLUSIVE") | flags
    launch(kernels.gradients, (p.chunks * batch, heads), *given, *found, *sizes, **options, **_work(p))
    to_write, to_read = amounts.sum(1).to(p.write.dtype)
    to_spread, to_gather = matrices.sum((1, 2)).to(p.spread.dtype)
    return (
        to_gate,
        to_write,
        to_read,
        to_spread.view_as(p.spread),
        to_gather.view_as(p.gather),
        to_v,
        to_beta.sum((0, 1)).to(p.beta.dtype) if p.flags["FREE"] else None,
        None,
        to_first.to(p.sums.dtype) if needed[8] else None,
        None,
    )
