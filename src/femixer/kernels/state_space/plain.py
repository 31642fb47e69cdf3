"""The state-space read in torch's operations: chunks of 16 tokens side by side, and a recurrence over their ends.

Inside a chunk the weight of token i at t is, for every channel, an entry of a product P Q over the modes,

    P[t, n] = read_t[n] exp(G_t[n]),   Q[n, i] = write_i[n] exp(-G_i[n]),   G: log decays summed from the middle token,

which float64 can hold, because a log decay below LEAST is taken for it. Sums of exponentials are relative to a running
shift, the largest exponent so far as it decays with the slowest mode. Blocks of channels are worked on one after the
other, so that no temporary has more than NUMBERS numbers; the backward pass computes each block again.

Axes: C channels, B batch, J chunks, L tokens of a chunk, N modes, S streams 1, v and exp(beta v - shift).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from femixer.kernels.marks import PADDING, is_padding, is_start
from femixer.kernels.precision import wide_dtype
from femixer.kernels.reading import last_top, read_of_sums, running_shift
from femixer.kernels.recurrence import linear_recurrence
from femixer.kernels.recurrence.plain import CHUNK, LEAST

NUMBERS = 2**23
# A token so many nats above the shift has too little weight to be seen.
FAR = 600.0

READS_RESULTS = False


class Layout(NamedTuple):
    """What is to be known of the tokens [B, T], None without marks; T is a multiple of the chunk's size L.

    visible [1, B, J, L, L] or [1, 1, 1, L, L]: whether a row t sees the token i of its chunk, through the state.
    """

    padding: Tensor | None
    start: Tensor | None
    visible: Tensor
    size: int

    def chunks(self, x: Tensor) -> Tensor:
        """[..., T] -> [..., J, L]"""
        return x.unflatten(-1, (-1, self.size))

    def segments(self) -> Tensor:
        """[B, J, L]: how many segments start in the chunk up to the token."""
        assert self.start is not None
        return self.chunks(self.start).cumsum(-1)

    def seen_at_end(self) -> Tensor | None:
        """[1, B, J, L, 1]: whether the end of its chunk sees a token."""
        if self.start is None:
            return None
        segments = self.segments()
        return (segments == segments[..., -1:]).double()[None, ..., None]


class Shift(NamedTuple):
    """Of exponents: at every token [C, B, J, L], and at the ends of the chunks and before the first [C, B, J + 1]."""

    tokens: Tensor
    ends: Tensor


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    return _read(arguments, lambda function, *given: function(*given))


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], _: object, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """By autograd. Of a block its arguments are kept until its turn comes."""
    with torch.enable_grad():
        again = [
            x.detach().requires_grad_(need) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x, need in zip(arguments, needed, strict=True)
        ]
        results = _read(tuple(again), partial(checkpoint, use_reentrant=False, preserve_rng_state=False))
        used = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None and y.requires_grad]
        inputs = [x for x in again if isinstance(x, Tensor) and x.requires_grad]
        found = iter(torch.autograd.grad([y for y, _ in used], inputs, [g for _, g in used], allow_unused=True))
    return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in again[:-1])


def _read(arguments: tuple[Any, ...], call: Callable[..., Any]) -> tuple[Tensor, ...]:
    """call(function, *arguments) runs what is computed of a block of channels."""
    rate, step, write, read, weight, skip, v, beta, marks, sums, top, exclusive = arguments
    length, width = v.shape[1:]
    if v.numel() == 0:
        return v.clone(), v.new_empty((0, 0, 0) if beta is None else v.shape), v.clone(), sums.clone(), top.clone()
    layout, (step, write, read, values) = _laid_out(marks, exclusive or skip is not None, step, write, read, v)
    rates = rate.double().mT[:, None, None, None]  # [C, 1, 1, 1, N]
    query = weight.double().mT[:, None, None, None] if read is None else read
    x, shift = _streams(step, values, beta, rates, top, layout)
    pace = layout.chunks(step)
    if arguments[1] is None and layout.padding is None:
        pace = pace[:, :, :1]  # all chunks decay alike
    blocks = max(1, -(-values.numel() * max(layout.size, rate.shape[0]) // NUMBERS))
    del step, values
    run = partial(_by_channels, call, -(-width // blocks))
    given = (x, None if shift is None else shift.tokens, layout.visible, layout.seen_at_end())
    y, written, fall = run(_within, rates, pace, write, query, *given)
    initial = sums[:, : x.shape[-1]].double().permute(3, 0, 2, 1)  # [C, B, N, S]
    carried, last = _carry(fall, written, initial, shift, layout)
    (past,) = run(_from_past, rates, pace, query, carried)
    y = torch.addcmul(y, past, _fade(x, shift, layout))
    if skip is not None and not exclusive:
        y = torch.addcmul(y, skip.double()[:, None, None, None, None], x)
    highest = None if shift is None else shift.tokens.flatten(2)
    warmth = None if beta is None else beta.double()[:, None, None]
    found = read_of_sums(y.flatten(2, 3).unbind(-1), highest, warmth, layout.padding)
    results = [r.permute(1, 2, 0)[:, :length].to(wide_dtype(v), memory_format=torch.contiguous_format) for r in found]
    last = last.permute(1, 3, 2, 0).to(sums.dtype, memory_format=torch.contiguous_format)  # [B, S, N, C]
    if shift is None:
        last = torch.cat([last, torch.zeros_like(sums[:, 2:])], 1)
        return results[0], v.new_empty(0, 0, 0), results[1], last, top.clone()
    return (
        *results,
        last.contiguous(),
        last_top(shift.ends[..., -1].mT).to(top.dtype, memory_format=torch.contiguous_format).contiguous(),
    )


def _laid_out(
    marks: Tensor | None, strictly: bool, step: Tensor | None, write: Tensor | None, read: Tensor | None, v: Tensor
) -> tuple[Layout, tuple[Any, ...]]:
    """Whole chunks of tokens, padding emptied: step and v as [C, B, T], write and read [1, B, J, L, N], float64."""
    length = v.shape[1]
    size = min(CHUNK, length)
    missing = -length % size
    if missing:
        marks = v.new_zeros(v.shape[:2], dtype=torch.int8) if marks is None else marks
        marks = F.pad(marks, (0, missing), value=PADDING)
    padding, start = (None, None) if marks is None else (is_padding(marks), is_start(marks))
    visible = v.new_ones(size, size, dtype=torch.float64).tril(-1 if strictly else 0)[None, None, None]
    layout = Layout(padding, start, visible, size)
    if marks is not None:
        segments = layout.segments()
        layout = layout._replace(visible=visible * (segments[..., None] == segments[..., None, :]))

    def tokens_last(x: Tensor) -> Tensor:
        x = F.pad(x.permute(2, 0, 1), (0, missing)).to(torch.float64, memory_format=torch.contiguous_format)
        return x if padding is None else x.masked_fill(padding, 0)

    def by_modes(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = F.pad(x.double(), (0, 0, 0, missing))
        x = x if padding is None else x.masked_fill(padding[..., None], 0)
        return x.unflatten(1, (-1, size))[None]

    if step is not None:
        steps = tokens_last(step)
    elif padding is None:
        steps = v.new_ones(1, 1, length, dtype=torch.float64)
    else:
        steps = (~padding).double()[None]
    return layout, (steps, by_modes(write), by_modes(read), tokens_last(v))


def _streams(
    step: Tensor, v: Tensor, beta: Tensor | None, rates: Tensor, top: Tensor, layout: Layout
) -> tuple[Tensor, Shift | None]:
    """What tokens write, step times 1, v and exp(beta v - shift), [C, B, J, L, S]; without beta only the first two."""
    streams, shift = [step.expand_as(v), step * v], None
    if beta is not None:
        exponent = beta.double()[:, None, None] * v
        slowest = (step * rates.amax(-1)[..., 0]).clamp_min(LEAST)
        highest, first = running_shift(exponent, slowest, top.double().mT, layout.padding, layout.start)
        below = exponent - highest
        below = below if layout.padding is None else below.masked_fill(layout.padding, 0)
        streams.append(step * below.exp())
        tokens = layout.chunks(highest)
        shift = Shift(tokens, torch.cat([first, tokens[..., -1]], -1))
    return torch.stack(streams, -1).unflatten(2, (-1, layout.size)), shift


def _by_channels(call: Callable[..., Any], block: int, function: Callable[..., Any], *tensors: Any) -> list[Tensor]:
    """The results of a function of tensors [C, ...] or [1, ...], a block of channels after the other."""
    found = [
        call(function, *(x if x is None or x.shape[0] == 1 else x[low : low + block] for x in tensors))
        for low in range(0, tensors[0].shape[0], block)
    ]
    return [torch.cat(parts, 0) for parts in zip(*found, strict=True)] if len(found) > 1 else list(found[0])


def _within(
    rates: Tensor,
    pace: Tensor,
    write: Tensor | None,
    query: Tensor,
    x: Tensor,
    shift: Tensor | None,
    visible: Tensor,
    seen_at_end: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums that rows read of their own chunk [C, B, J, L, S], what the chunk leaves in the modes [C, B, J, N, S], and
    its log decay [C, B or 1, J or 1, N]."""
    out, into, end, fall = _factors(rates, pace, write, query)
    pairs = (out @ into.mT) * visible
    y, left = pairs @ x[..., :2], x
    if shift is not None:
        fade = (shift[..., None, :] - shift[..., None]).clamp_max(FAR).exp()
        y = torch.cat([y, (pairs * fade) @ x[..., 2:]], -1)
        left = torch.cat([x[..., :2], x[..., 2:] * fade[..., -1, :, None]], -1)
    if seen_at_end is not None:
        left = left * seen_at_end
    return y, (into.mT @ left) * end[..., None], fall


def _factors(rates: Tensor, pace: Tensor, write: Tensor | None, query: Tensor) -> tuple[Tensor, ...]:
    """P and Q as [C, B, J, L, N]; exp(G) at the chunk's end, and the chunk's log decay [C, B, J, N]."""
    reach = (pace[..., None] * rates).clamp_min(LEAST).cumsum(-2)
    fall = reach[..., -1, :].clone()  # not a view, which would keep the whole
    half = reach.shape[-2] // 2
    reach = reach - reach[..., half : half + 1, :]
    into, out = (-reach).exp(), reach.exp()
    return out * query, into if write is None else into * write, out[..., -1, :].clone(), fall


def _from_past(rates: Tensor, pace: Tensor, query: Tensor, carried: Tensor) -> tuple[Tensor]:
    """Sums that rows read of what came before their chunk, as far above the shift as that was [C, B, J, L, S]."""
    reach = (pace[..., None] * rates).clamp_min(LEAST).cumsum(-2)
    return ((reach.exp() * query) @ carried,)


def _fade(x: Tensor, shift: Shift | None, layout: Layout) -> Tensor:
    """With what the past of its chunk is multiplied at a token, by its stream."""
    fade = x.new_ones(1)
    if shift is not None:
        fade = (shift.ends[..., :-1, None] - shift.tokens).clamp_max(FAR).exp()
        fade = F.pad(fade[..., None], (2, 0), value=1.0)
    return fade if layout.start is None else fade * (layout.segments() == 0)[..., None]


def _carry(
    fall: Tensor, written: Tensor, initial: Tensor, shift: Shift | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The modes before every chunk [C, B, J, N, S], and after the last [C, B, N, S]."""
    log_decay = fall[..., None]
    if shift is not None:
        rise = shift.ends[..., :-1] - shift.ends[..., 1:]
        log_decay = log_decay + F.pad(rise[..., None, None], (2, 0))
    if layout.start is not None:
        log_decay = log_decay.masked_fill((layout.segments()[..., -1] > 0)[..., None, None], -torch.inf)
    decay, inputs = (x.flatten(3).flatten(0, 1) for x in (log_decay.exp().expand_as(written), written))
    h = linear_recurrence(decay, inputs, initial.flatten(2).flatten(0, 1), resets=layout.start is not None)
    h = h.reshape(written.shape)
    return torch.cat([initial[:, :, None], h[:, :, :-1]], 2), h[:, :, -1]
