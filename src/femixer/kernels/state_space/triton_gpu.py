"""The state-space read on GPUs: chunks of time side by side, three launches, one for short sequences.

The backward saves no modes: it summarizes the chunks again and holds the states of a few tokens at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from femixer.kernels.state_space import OPERATOR, triton_backward, triton_kernels
from femixer.kernels.triton_launch import HALF_OR_SINGLE, all_registers, launch, size_of, target_of
from femixer.kernels.triton_tokens import empty_read, rows

# Tokens of a chunk; those whose states the backward holds in registers at a time; and those between the states from
# which it computes them again.
CHUNK, STRETCH, STOP = 64, 4, 8
# Modes times channels of a program, and the most modes.
NUMBERS, MOST_MODES = 512, 64
READS_RESULTS = slice(0, 4)


def results(*arguments: Any) -> tuple[Tensor, ...]:
    _, free, _, last, last_top = OPERATOR.results(*arguments)
    return *empty_read(arguments[6], free.shape), last, last_top


def refuse(*arguments: Any) -> str | None:
    rate, v = arguments[0], arguments[6]
    if v.dtype not in HALF_OR_SINGLE:
        return f"it takes float32, bfloat16 and float16, not {v.dtype}"
    if not v.shape[1]:
        return "there is no token"
    return None if rate.shape[0] <= MOST_MODES else f"{rate.shape[0]} modes are too many, {MOST_MODES} are the most"


class Problem(NamedTuple):
    """The operator's arguments, contiguous but for v, whose rows lie v_step numbers apart; what is missing is stood in
    for by v, which is not read then."""

    rate: Tensor
    v: Tensor
    step: Tensor
    write: Tensor
    read: Tensor
    weight: Tensor
    skip: Tensor
    beta: Tensor
    marks: Tensor
    sums: Tensor
    top: Tensor
    v_step: int
    marked: int
    flags: dict[str, bool]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, C, N"""
        return *self.v.shape, self.rate.shape[0]

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.v.shape[1], CHUNK)

    def tiles(self, numbers: int = NUMBERS) -> dict[str, int]:
        modes = triton.next_power_of_2(self.rate.shape[0])
        return {"BLOCK": max(8, numbers // modes), "MODES": modes}

    def blocks(self, numbers: int = NUMBERS) -> int:
        """Of channels."""
        return triton.cdiv(self.v.shape[2], self.tiles(numbers)["BLOCK"])

    def chosen(self, *names: str) -> dict[str, bool]:
        return {name: self.flags[name] for name in names}


def _problem(arguments: tuple[Any, ...]) -> Problem:
    v, v_step = rows(arguments[6])
    rate, step, write, read, weight, skip, _, beta, marks, sums, top, exclusive = (
        x.contiguous() if isinstance(x, Tensor) and x is not arguments[6] else x for x in arguments
    )
    flags = {
        "FREE": beta is not None,
        "HAS_STEP": step is not None,
        "HAS_WRITE": write is not None,
        "HAS_READ": read is not None,
        "INCLUSIVE": skip is None and not exclusive,
        "SKIPS": skip is not None and not exclusive,
    }
    missing = {"step": step, "write": write, "read": read, "weight": weight, "skip": skip, "beta": beta}
    given: dict[str, Any] = {name: v if x is None else x for name, x in missing.items()}
    marked = int(marks is not None)
    marks = v.new_empty(1, dtype=torch.int8) if marks is None else marks
    return Problem(rate=rate, v=v, marks=marks, sums=sums, top=top, v_step=v_step, marked=marked, flags=flags, **given)


def _work(p: Problem, passes: float = 1, back: int = 0) -> dict[str, int]:
    """Exponentials of passes over all tokens: five per channel, and one per mode except on ways back."""
    batch, length, channels, modes = p.shape
    return {"exponentials": int(batch * length * channels * (passes * (modes + 5) + 5 * back))}


def _states_before(p: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of all chunks: sums [B, chunks, 3, N, C], tops and steps together [B, chunks, C]."""
    batch, length, channels, modes = p.shape
    if p.chunks == 1:
        return p.sums, p.top, None
    new = torch.float32
    sums = torch.empty(batch, p.chunks, 3, modes, channels, dtype=new, device=p.v.device)
    tops, paces = torch.empty(2, batch, p.chunks, channels, dtype=new, device=p.v.device)
    sizes = channels, modes, p.chunks
    given = p.rate, p.v, p.step, p.write, p.beta, p.marks, sums, tops, paces, length, *sizes, p.v_step, p.marked
    flags = p.chosen("FREE", "HAS_STEP", "HAS_WRITE")
    launch(
        triton_kernels.summarize,
        (p.chunks * batch, p.blocks()),
        *given,
        **p.tiles(),
        CHUNK=CHUNK,
        **flags,
        num_warps=4,
        **_work(p),
    )
    given = p.rate, sums, tops, paces, p.sums, p.top, *sizes
    moved = 2 * sums.numel() * 4
    launch(triton_kernels.carry, (batch, p.blocks()), *given, **p.tiles(), **p.chosen("FREE"), num_warps=4, moved=moved)
    return sums, tops, paces


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    p = _problem(arguments)
    batch, length, channels, modes = p.shape
    states, tops, _ = _states_before(p)
    mean, free, log_total = empty_read(p.v, p.v.shape if p.flags["FREE"] else (0, 0, 0))
    last, last_top = torch.empty_like(p.sums), torch.empty_like(p.top)
    given = p.rate, p.v, p.step, p.write, p.read, p.weight, p.skip, p.beta, p.marks, states, tops
    results = mean, free if p.flags["FREE"] else mean, log_total, last, last_top
    sizes = length, channels, modes, p.chunks, p.v_step, p.marked
    grid = (p.chunks * batch, p.blocks())
    launch(
        triton_kernels.read_chunks,
        grid,
        *given,
        *results,
        *sizes,
        **p.tiles(),
        CHUNK=CHUNK,
        **p.flags,
        num_warps=4,
        **all_registers(target_of(p.v)),
        **_work(p),
    )
    return mean, free, log_total, last, last_top if p.flags["FREE"] else p.top.clone()


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    p = _problem(arguments)
    batch, length, channels, modes = p.shape
    sums, tops, paces = _states_before(p)
    new: dict[str, Any] = {"dtype": torch.float32, "device": p.v.device}
    mean, free, log_total, last = results
    token_tops = torch.empty(batch, length, channels, **new)
    by = [log_total if g is None else g.contiguous() for g in grads[:4]]
    flags = {"BY_MEAN": grads[0] is not None, "BY_FREE": grads[1] is not None}
    by_total = int(grads[2] is not None)
    read = mean, free if p.flags["FREE"] else mean, log_total, *by[:3]
    sizes = length, channels, modes, p.chunks
    back = torch.empty(batch, p.chunks, 3, modes, channels, **new)
    given = (
        p.rate,
        p.v,
        p.step,
        p.read,
        p.weight,
        p.beta,
        p.marks,
        tops,
        token_tops,
        *read,
        back,
        *sizes,
        p.v_step,
        p.marked,
        by_total,
    )
    chosen = p.chosen("FREE", "HAS_STEP", "HAS_READ") | flags
    grid = (p.chunks * batch, p.blocks())
    launch(triton_backward.adjoints, grid, *given, **p.tiles(), CHUNK=CHUNK, **chosen, num_warps=4, **_work(p))
    if p.chunks == 1:
        _after_one_chunk(p, back, grads[3])
    else:
        last_top = token_tops[:, -1].contiguous()
        given = p.rate, back, tops, paces, last_top, by[3], *sizes[1:]
        options = {**p.tiles(), **p.chosen("FREE"), "BY_LAST": grads[3] is not None}
        launch(
            triton_backward.carry_back, (batch, p.blocks()), *given, **options, num_warps=4, moved=2 * back.numel() * 4
        )
    return _gradients(p, sums, tops, token_tops, back, (*read, last), by_total, flags, needed)


def _after_one_chunk(p: Problem, back: Tensor, to_last: Tensor | None) -> None:
    """The gradient of the state after the only chunk, where `carry_back` would put it."""
    if to_last is None:
        back.zero_()
    else:
        back.copy_(to_last[:, None])


def _gradients(
    p: Problem,
    sums: Tensor,
    tops: Tensor,
    token_tops: Tensor,
    back: Tensor,
    read: tuple[Tensor, ...],
    by_total: int,
    flags: dict[str, bool],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    batch, length, channels, modes = p.shape
    numbers = NUMBERS // 2
    blocks = p.blocks(numbers)
    new: dict[str, Any] = {"dtype": torch.float32, "device": p.v.device}
    nothing = token_tops  # in the place of what is not written
    to_rate = torch.empty(batch, p.chunks, modes, channels, **new)
    to_weight = nothing if p.flags["HAS_READ"] else torch.empty_like(to_rate)
    added = not torch.are_deterministic_algorithms_enabled()
    amounts: Tensor | None = None
    if p.flags["HAS_READ"] or p.flags["HAS_WRITE"]:
        shape = batch, length, modes
        amounts = torch.zeros(2, *shape, **new) if added else torch.empty(2, blocks, *shape, **new)
    to_write, to_read = (nothing, nothing) if amounts is None else amounts
    to_step = torch.empty_like(p.step) if p.flags["HAS_STEP"] else nothing
    to_skip, to_beta = torch.empty(2, batch, p.chunks, channels, **new)
    to_v = torch.empty(p.v.shape, dtype=p.v.dtype, device=p.v.device)
    to_first = torch.empty(batch, 3, modes, channels, **new)
    given = p.rate, p.v, p.step, p.write, p.read, p.weight, p.skip, p.beta, p.marks, sums, tops, token_tops, back
    found = to_rate, to_step, to_write, to_read, to_weight, to_skip, to_v, to_beta, to_first
    sizes = length, channels, modes, p.chunks, batch, p.v_step, p.marked, by_total
    options = {**p.tiles(numbers), "CHUNK": CHUNK, "STRETCH": STRETCH, "STOP": STOP, **p.flags, **flags, "num_warps": 8}
    again = size_of(amounts) if added else 0  # what is added to is read and written, from the cache by every block
    # Up to the last stop, from a stop to each stretch, every stretch, and back.
    work = _work(p, passes=(CHUNK - STOP) / CHUNK + (STOP - STRETCH) / (2 * STRETCH) + 1, back=1)
    launch(
        triton_backward.gradients,
        (p.chunks * batch, p.blocks(numbers)),
        *given,
        *read,
        *found,
        *sizes,
        ADDED=added,
        moved=size_of(*given, *read, *found) + again,
        loaded=blocks * again,
        **options,
        **work,
    )
    by_modes = amounts if amounts is None or added else amounts.sum(1)
    rate = to_rate.sum((0, 1))
    return (
        rate.to(p.rate.dtype),
        to_step if p.flags["HAS_STEP"] else None,
        None if by_modes is None or not p.flags["HAS_WRITE"] else by_modes[0].to(p.write.dtype),
        None if by_modes is None or not p.flags["HAS_READ"] else by_modes[1].to(p.read.dtype),
        None if p.flags["HAS_READ"] else to_weight.sum((0, 1)).to(p.weight.dtype),
        to_skip.sum((0, 1)).to(p.skip.dtype) if p.flags["SKIPS"] else None,
        to_v,
        to_beta.sum((0, 1)).to(p.beta.dtype) if p.flags["FREE"] else None,
        None,
        to_first.to(p.sums.dtype) if needed[9] else None,
        None,
    )
