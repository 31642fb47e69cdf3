"""The state-space read in torch's operations: chunks of tokens side by side, and a recurrence over their ends.

Inside a chunk the weight of token i at t is, for every channel, an entry of a product P Q over the modes,

    P[t, n] = read_t[n] exp(G_t[n]),   Q[n, i] = write_i[n] exp(-G_i[n]),   G: log decays summed from the middle token,

which the float type can hold, because a log decay below `least` is taken for it: -80 in float64 with chunks of 16, -20
in float32 with chunks of 8. Sums of exponentials are relative to a running shift, the largest exponent so far as it
decays with the slowest mode. Blocks of channels are worked on one after the other, so that no temporary has more than
NUMBERS numbers; the backward pass computes each block again.

Axes: C channels, B batch, J chunks, L tokens of a chunk, N modes, S streams 1, v and exp(beta v - shift).
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import PADDING, is_padding, is_start
from femixer.kernels.operator import wide_dtype
from femixer.kernels.reading import TINY, last_top, read_of_sums, running_shift, state_dtype, wide
from femixer.kernels.recurrence.plain import CHUNK, LEAST, scan

# Of the forward and of the backward pass, which holds more tensors at a time.
NUMBERS, BACKWARD_NUMBERS = 2**24, 3 * 2**22
# Tokens of a chunk, and the least log decay.
SIZES = {torch.float64: (CHUNK, LEAST), torch.float32: (8, -20.0)}

READS_RESULTS = False


class Layout(NamedTuple):
    """What is to be known of the tokens [B, T], None without marks; T is a multiple of the chunk's size L.

    hidden [1, B, J, L, L] or [L, L]: whether a row t does not see the token i of its chunk, through the state.
    """

    padding: Tensor | None
    start: Tensor | None
    hidden: Tensor
    size: int
    least: float

    def chunks(self, x: Tensor) -> Tensor:
        """[..., T] -> [..., J, L]"""
        return x.unflatten(-1, (-1, self.size))

    def segments(self) -> Tensor:
        """[B, J, L]: how many segments start in the chunk up to the token."""
        assert self.start is not None
        return self.chunks(self.start).cumsum(-1)


class Inputs(NamedTuple):
    """Of the channels, or of a block of them: rates [C, N], pace (the steps) [C or 1, B, J, L], write [1, B, J, L, N],
    query [C or 1, B, J, L, N], where 1 may stand for B, J and L; streams x [C, B, J, L, S] relative to shift
    [C, B, J, L], which is `ends` [C, B, J + 1] at the chunks' ends and before the first; modes before the first token
    [C, B, N, S]; skip and beta [C, 1, 1].
    """

    rates: Tensor
    pace: Tensor
    write: Tensor | None
    query: Tensor
    x: Tensor
    shift: Tensor | None
    ends: Tensor | None
    initial: Tensor
    skip: Tensor | None
    beta: Tensor | None

    def blocks(self, numbers: int) -> Iterator[tuple[slice, "Inputs"]]:
        """Blocks of channels, of so many numbers per token, channel and mode."""
        channels, modes = self.rates.shape
        block = -(-channels // max(1, -(-self.x[..., 0].numel() * max(self.pace.shape[-1], modes) // numbers)))
        for here in (slice(low, low + block) for low in range(0, channels, block)):
            yield here, Inputs(*(x if x is None or x.shape[0] == 1 else x[here] for x in self))  # type: ignore[arg-type]


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    v, beta, sums, top = (arguments[i] for i in (6, 7, 9, 10))
    if v.numel() == 0:
        return v.clone(), v.new_empty((0, 0, 0) if beta is None else v.shape), v.clone(), sums.clone(), top.clone()
    kind = wide_dtype(v)
    inputs, layout = _prepared(arguments)
    found = []
    for _, block in inputs.blocks(NUMBERS):
        work = Work(block, layout)
        highest = None if block.shift is None else block.shift.flatten(2)
        read = read_of_sums(work.y.flatten(2, 3).unbind(-1), highest, block.beta, layout.padding)
        found.append([*read, work.last.clone()])
        del work  # before the next block takes its memory
    *shown, last = (torch.cat(parts) for parts in zip(*found, strict=True))
    shown = [x.permute(1, 2, 0)[:, : v.shape[1]].to(kind, memory_format=torch.contiguous_format) for x in shown]
    mean, *free, log_total = shown
    last = last.permute(1, 3, 2, 0).to(sums.dtype)  # [B, S, N, C]
    if inputs.ends is None:
        last = torch.cat([last, torch.zeros_like(sums[:, 2:])], 1)
        return mean, v.new_empty(0, 0, 0), log_total, last, top.clone()
    last_shift = last_top(inputs.ends[..., -1].mT).to(top.dtype)
    return mean, *free, log_total, last.contiguous(), last_shift.contiguous()


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """What is elementwise goes by autograd, the sums through the state by `Work`."""
    made: Iterable[Any]
    to: Iterable[Any]
    with torch.enable_grad():
        again = [
            x.detach().requires_grad_(need) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x, need in zip(arguments, needed, strict=True)
        ]
        if again[6].numel() == 0:
            made, to = forward(*again), grads
        else:
            inputs, layout = _prepared(tuple(again))
            plain = Inputs(*(None if x is None else x.detach() for x in inputs))  # type: ignore[arg-type]
            made, to = inputs, _gradients(plain, layout, grads)
        used = [(x, g) for x, g in zip(made, to, strict=True) if x is not None and g is not None and x.requires_grad]
        leaves = [x for x in again if isinstance(x, Tensor) and x.requires_grad]
        found = iter(torch.autograd.grad([x for x, _ in used], leaves, [g for _, g in used], allow_unused=True))
    return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in again[:-1])


def _gradients(inputs: Inputs, layout: Layout, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Of the inputs, those of `shift` and `ends` being none."""
    length = inputs.x.shape[2] * layout.size

    def tokens_last(g: Tensor | None) -> Tensor | None:
        if g is None:
            return None
        g = F.pad(g.permute(2, 0, 1).to(inputs.x.dtype), (0, length - g.shape[1]))
        return g if layout.padding is None else g.masked_fill(layout.padding, 0)

    of_results = [tokens_last(g) for g in (grads[:3] if inputs.beta is not None else (grads[0], grads[2]))]
    to_last = None if grads[3] is None else grads[3].to(inputs.x.dtype).permute(3, 0, 2, 1)[..., : inputs.x.shape[-1]]
    found: list[list[Tensor | None]] = []
    for channels, block in inputs.blocks(BACKWARD_NUMBERS):
        work = Work(block, layout)
        to_y, to_beta = _read_gradients(work.y, block, layout, [None if g is None else g[channels] for g in of_results])
        found.append([*work.gradients(to_y, None if to_last is None else to_last[channels]), to_beta])
        del work, to_y  # before the next block takes its memory
    together: list[Tensor | None] = []
    for whole, *parts in zip(inputs, *found, strict=True):
        known = [x for x in parts if x is not None]
        shared = whole is not None and whole.shape[0] == 1  # by all blocks
        together.append(None if not known else torch.stack(known).sum(0) if shared else torch.cat(known))
    return together


def _read_gradients(
    y: Tensor, inputs: Inputs, layout: Layout, grads: list[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Of the sums and of beta, from those of mean, free energy and log total: slope = d free / beta."""
    y = y.flatten(2, 3)
    to_mean, *to_free, to_log = (torch.zeros_like(y[..., 0]) if g is None else g for g in grads)
    inverse = 1 / y[..., 0].masked_fill(y[..., 0] <= TINY, torch.inf)
    mean = y[..., 1] * inverse
    streams, to_beta = [], None
    if inputs.beta is not None and inputs.shift is not None:
        ratio = y[..., 2] * inverse
        value = (inputs.shift.flatten(2) + ratio.log()) / inputs.beta
        at_mean = (value <= mean) | (ratio <= TINY)
        to_mean = to_mean + to_free[0].where(at_mean, 0)
        slope = (to_free[0] / inputs.beta).masked_fill(at_mean, 0)
        to_log = to_log - slope
        streams = [slope / y[..., 2].masked_fill(at_mean, 1)]
        to_beta = -(slope * value.masked_fill(at_mean, 0)).sum((1, 2), keepdim=True)
    to_y = torch.stack([(to_log - to_mean * mean) * inverse, to_mean * inverse, *streams], -1)
    return to_y.unflatten(2, (-1, layout.size)), to_beta


def _prepared(arguments: tuple[Any, ...]) -> tuple[Inputs, Layout]:
    """In whole chunks, padding emptied, in `wide`. Tokens write step times 1, v and exp(beta v - shift)."""
    rate, step, write, read, weight, skip, v, beta, marks, sums, top, exclusive = arguments
    dtype = torch.promote_types(v.dtype, state_dtype(v.device))
    layout = _laid_out(marks, exclusive or skip is not None, v, *SIZES[dtype])
    missing, padding = -v.shape[1] % layout.size, layout.padding

    def tokens_last(x: Tensor) -> Tensor:
        x = F.pad(x.permute(2, 0, 1), (0, missing)).to(dtype, memory_format=torch.contiguous_format)
        return x if padding is None else x.masked_fill(padding, 0)

    def by_modes(x: Tensor) -> Tensor:
        x = F.pad(x.to(dtype), (0, 0, 0, missing))
        x = x if padding is None else x.masked_fill(padding[..., None], 0)
        return x.unflatten(1, (-1, layout.size))[None]

    rates, values = wide(rate).mT, tokens_last(v)
    every = values.new_ones(1, 1, v.shape[1]) if padding is None else (~padding).to(dtype)[None]
    steps = every if step is None else tokens_last(step)
    streams, shift, ends = [steps.expand_as(values), steps * values], None, None
    warmth, skips = (None if x is None else wide(x)[:, None, None] for x in (beta, None if exclusive else skip))
    if warmth is not None:
        exponent = warmth * values
        slowest = (steps * rates.detach().amax(-1)[:, None, None]).clamp_min(layout.least)
        highest, first = running_shift(exponent, slowest, top.to(dtype).mT, padding, layout.start)
        below = exponent - highest
        streams.append(steps * (below if padding is None else below.masked_fill(padding, 0)).exp())
        shift = layout.chunks(highest)
        ends = torch.cat([first, shift[..., -1]], -1)
    x = torch.stack(streams, -1).unflatten(2, (-1, layout.size))
    pace = layout.chunks(steps)
    if step is write is read is padding is None:
        pace = pace[:, :, :1]  # all chunks decay alike
    query = wide(weight).mT[:, None, None, None] if read is None else by_modes(read)
    initial = wide(sums[:, : x.shape[-1]]).permute(3, 0, 2, 1)
    writes = None if write is None else by_modes(write)
    return Inputs(rates, pace, writes, query, x, shift, ends, initial, skips, warmth), layout


def _laid_out(marks: Tensor | None, strictly: bool, v: Tensor, size: int, least: float) -> Layout:
    size = min(size, v.shape[1])
    hidden = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(0 if strictly else 1)
    missing = -v.shape[1] % size
    if marks is None and not missing:
        return Layout(None, None, hidden, size, least)
    marks = v.new_zeros(v.shape[:2], dtype=torch.int8) if marks is None else marks
    marks = F.pad(marks, (0, missing), value=PADDING)
    layout = Layout(is_padding(marks), is_start(marks), hidden, size, least)
    segments = layout.segments()
    return layout._replace(hidden=(hidden | (segments[..., None] != segments[..., None, :]))[None])


class Work:
    """What is computed of a block of channels: the sums y [C, B, J, L, S] that rows read, and the modes after the last
    chunk [C, B, N, S]."""

    def __init__(self, inputs: Inputs, layout: Layout) -> None:
        rates, pace, write, query, x, shift, ends, initial, *_ = inputs
        self.inputs, self.layout = inputs, layout
        alike = pace.shape[1:3] != x.shape[1:3]
        # Of factors and of pairs, where all chunks have the same ones.
        self.modes, self.pairs = ("cln", "cti") if alike else ("cbjln", "cbjti")
        reach = (pace[..., None] * rates[:, None, None, None]).clamp_min(layout.least).cumsum(-2)
        start, fall = reach[..., layout.size // 2, :].clone(), reach[..., -1, :].clone()
        self.middle = reach - start[..., None, :]
        del reach
        self.p, self.q = self.middle.exp() * query, (-self.middle).exp()
        self.q = self.q if write is None else self.q * write
        self.a = (self.p @ self.q.mT).masked_fill(layout.hidden, 0)
        self.begin, self.end, self.fall = start.exp()[..., None], (fall - start).exp()[..., None], fall
        self.fade: Tensor | None = None
        log_decay, past_fade, seen = fall[..., None], None, None
        y, left = torch.einsum(f"{self.pairs},cbjis->cbjts", self._one(self.a), x[..., :2]), x
        if shift is not None and ends is not None:
            most = 0.85 * math.log(torch.finfo(x.dtype).max)  # what is so far above the shift has no weight
            self.fade = (shift[..., None, :] - shift[..., None]).clamp_max(most).exp()
            y = torch.cat([y, (self.a * self.fade) @ x[..., 2:]], -1)
            left = torch.cat([x[..., :2], x[..., 2:] * self.fade[..., -1, :, None]], -1)
            log_decay = log_decay + F.pad((ends[..., :-1] - ends[..., 1:])[..., None, None], (2, 0))
            past_fade = F.pad((ends[..., :-1, None] - shift).clamp_max(most).exp()[..., None], (2, 0), value=1.0)
        if layout.start is not None:
            segments = layout.segments()
            seen = (segments == segments[..., -1:])[..., None].to(x.dtype)
            left = left * seen
            log_decay = log_decay.masked_fill((segments[..., -1] > 0)[..., None, None], -torch.inf)
            continued = (segments == 0)[..., None].to(x.dtype)
            past_fade = continued if past_fade is None else past_fade * continued
        self.left, self.seen, self.past_fade = left, seen, past_fade
        written = torch.einsum(f"{self.modes},cbjls->cbjns", self._one(self.q), left) * self.end
        self.decay = log_decay.expand_as(written)
        self.h = _recurrence(self.decay, written, initial, layout.start is not None)
        self.k = torch.cat([initial[:, :, None], self.h[:, :, :-1]], 2) * self.begin
        past = torch.einsum(f"{self.modes},cbjns->cbjls", self._one(self.p), self.k)
        self.y, self.last = y + (past if past_fade is None else past * past_fade), self.h[:, :, -1]
        if inputs.skip is not None:
            self.y = torch.addcmul(self.y, inputs.skip[..., None, None], x)

    def _one(self, x: Tensor) -> Tensor:
        """Of all chunks, if they are alike."""
        return x[:, 0, 0] if self.modes == "cln" else x

    def _all(self, x: Tensor) -> Tensor:
        return x[:, None, None] if self.modes == "cln" else x

    def gradients(self, to_y: Tensor, to_last: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the inputs but beta, from those of y and of the last modes."""
        rates, pace, write, query, x, *_ = self.inputs
        layout, modes = self.layout, self.modes
        to_past = to_y if self.past_fade is None else to_y * self.past_fade
        to_before = torch.einsum(f"{modes},cbjls->cbjns", self._one(self.p), to_past) * self.begin
        to_last = torch.zeros_like(self.last) if to_last is None else to_last
        # Gradients of the modes before each chunk and after the last: the same recurrence backwards.
        to_modes = torch.cat([to_before, to_last[:, :, None]], 2).flip(2)
        to_modes = _recurrence(
            F.pad(self.decay.flip(2), (0, 0, 0, 0, 1, 0)), to_modes, None, layout.start is not None
        ).flip(2)
        to_end = to_modes[:, :, 1:]
        across = (self.h * to_end).sum(-1).sum_to_size(self.fall.shape)  # what flows across chunks' ends
        to_end = to_end * self.end
        to_left = torch.einsum(f"{modes},cbjns->cbjls", self._one(self.q), to_end)
        to_left = to_left if self.seen is None else to_left * self.seen
        d_x = torch.einsum(f"{self.pairs},cbjts->cbjis", self._one(self.a), to_y[..., :2])
        to_pairs = self._all(torch.einsum(f"cbjts,cbjis->{self.pairs}", to_y[..., :2], x[..., :2]))
        if self.fade is not None:
            d_x = torch.cat([d_x, (self.a * self.fade).mT @ to_y[..., 2:]], -1)
            to_left = torch.cat([to_left[..., :2], to_left[..., 2:] * self.fade[..., -1, :, None]], -1)
            to_pairs = to_pairs + ((to_y[..., 2:] @ x[..., 2:].mT) * self.fade).sum_to_size(self.a.shape)
        d_x, d_skip = d_x.add_(to_left), None
        if self.inputs.skip is not None:
            d_x.addcmul_(to_y, self.inputs.skip[..., None, None])
            d_skip = (to_y * x).sum((1, 2, 3, 4))[:, None, None]
        to_pairs = to_pairs.masked_fill(layout.hidden, 0)
        # What is not needed any more goes at once: these are the largest of all tensors.
        d_q = (to_pairs.mT @ self.p).add_(self._all(torch.einsum(f"cbjls,cbjns->{modes}", self.left, to_end)))
        del self.p, self.a, self.fade, self.decay, self.h, to_end
        d_p = (to_pairs @ self.q).add_(self._all(torch.einsum(f"cbjls,cbjns->{modes}", to_past, self.k)))
        del self.q, self.k, to_pairs
        d_p.mul_(self.middle.exp())
        d_q.mul_(self.middle.neg_().exp_())
        del self.middle
        d_query, d_write = d_p.sum_to_size(query.shape), None if write is None else d_q.sum_to_size(write.shape)
        # A gate's gradient is what flows across it: to later tokens of its chunk and across the chunk's end.
        flow = d_p * query
        flow = flow.sub_(d_q) if write is None else flow.addcmul_(d_q, write, value=-1)
        del d_p, d_q
        within = flow.cumsum(-2)
        flow = flow.sub_(within).add_(within[..., -1:, :] + across[..., None, :])
        del within
        rates = rates[:, None, None, None]
        flow = flow.masked_fill_(pace[..., None] * rates < layout.least, 0)
        d_pace, d_rates = (flow * rates).sum(-1).sum_to_size(pace.shape), (flow * pace[..., None]).sum((1, 2, 3))
        return d_rates, d_pace, d_write, d_query, d_x, None, None, to_modes[:, :, 0].clone(), d_skip


def _recurrence(log_decay: Tensor, x: Tensor, initial: Tensor | None, resets: bool) -> Tensor:
    """Along J of [C, B, J, N, S]."""
    first = None if initial is None else initial.flatten(2).flatten(0, 1)
    flat = [y.flatten(3).flatten(0, 1) for y in (log_decay, x)]
    return scan(flat[0], flat[1], first, resets=resets).view(x.shape)
