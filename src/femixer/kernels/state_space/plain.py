"""The state-space read in torch's operations: chunks of tokens side by side, and a recurrence over their ends.

Inside a chunk the weight of token i at t is, for every channel, an entry of a product P Q over the modes,

    P[t, n] = read_t[n] exp(G_t[n]),   Q[n, i] = write_i[n] exp(-G_i[n]),   G: log decays summed from the middle token,

which the float type can hold, because a log decay below `least` is taken for it: -80 in float64 with chunks of 16, -20
in float32 with chunks of 8. Sums of exponentials are relative to a running shift, the largest exponent so far as it
decays with the slowest mode. Blocks of channels are worked on one after the other, so that no temporary has more than
NUMBERS numbers; the backward pass computes each block again.

Axes: C channels, B batch, J chunks, L tokens of a chunk, N modes, S streams 1, v and exp(beta v - shift).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import PADDING, is_padding, is_start
from femixer.kernels.operator import wide_dtype
from femixer.kernels.reading import (
    Inverses,
    last_top,
    read_of_sums,
    running_shift,
    state_dtype,
    undo_read_of_sums,
    wide,
)
from femixer.kernels.recurrence.plain import CHUNK, LEAST, scan

# Of the forward and of the backward pass, which holds more tensors at a time.
NUMBERS, BACKWARD_NUMBERS = 2**25, 2**24 - 1
# Tokens of a chunk, the least log decay, and the most above a shift: what is further has no weight.
SIZES = {torch.float64: (CHUNK, LEAST, 600.0), torch.float32: (8, -20.0, 75.0)}

READS_RESULTS = slice(0, 3)


class Layout(NamedTuple):
    """What is to be known of the tokens [B, T], None without marks; T is a multiple of the chunk's size L.

    hidden [1, B, J, L, L] or [L, L]: whether a row t does not see the token i of its chunk, through the state.
    """

    padding: Tensor | None
    start: Tensor | None
    hidden: Tensor
    size: int
    least: float
    most: float

    def segments(self) -> Tensor:
        """[B, J, L]: how many segments start in the chunk up to the token."""
        assert self.start is not None
        return self.start.unflatten(-1, (-1, self.size)).cumsum(-1)

    def until_the_end(self) -> Tensor:
        """[B, J, L, 1]: whether no segment starts in the chunk after the token."""
        segments = self.segments()
        return (segments == segments[..., -1:])[..., None]


class Inputs(NamedTuple):
    """Of the channels, or of a block of them: rates [C, N], pace (the steps) [C or 1, B, J, L], write [1, B, J, L, N],
    query [C or 1, B, J, L, N], where 1 may stand for B, J and L; streams x [C, B, J, L, S] relative to shift
    [C, B, J, L]; modes before the first token [C, B, N, S]; how the streams decay over a chunk beside the modes,
    `drift` [C, B, J, 1, S] as a logarithm, and the exponentials from tokens `to_end` and from the chunk before to the
    rows, `fade` [C, B, J, L], all None for not at all; skip and beta [C, 1, 1].
    """

    rates: Tensor
    pace: Tensor
    write: Tensor | None
    query: Tensor
    x: Tensor
    initial: Tensor
    shift: Tensor | None
    drift: Tensor | None
    to_end: Tensor | None
    fade: Tensor | None
    skip: Tensor | None
    beta: Tensor | None

    def blocks(self, numbers: int, *more: Tensor) -> Iterator[tuple["Inputs", list[Tensor]]]:
        """Blocks of channels, of so many numbers per token, channel and mode, and the same of `more`."""
        channels, modes = self.rates.shape
        each = self.pace.shape[-1] if _is_alike(self) else max(self.pace.shape[-1], modes)
        block = -(-channels // max(1, -(-self.x[..., 0].numel() * each // numbers)))
        for here in (slice(low, low + block) for low in range(0, channels, block)):
            own = (x if x is None or x.shape[0] == 1 else x[here] for x in self)
            yield Inputs(*own), [x[here] for x in more]  # type: ignore[arg-type]


class Tokens(NamedTuple):
    """Of all tokens [C, B, T]: values, steps (None for ones) and exp(beta v - shift)."""

    values: Tensor
    steps: Tensor | None
    above: Tensor | None


def _is_alike(inputs: Inputs) -> bool:
    """Whether all chunks have the same factors and pairs."""
    return inputs.pace.shape[1:3] != inputs.x.shape[1:3]


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    v, beta, sums, top = (arguments[i] for i in (6, 7, 9, 10))
    if v.numel() == 0:
        return v.clone(), v.new_empty((0, 0, 0) if beta is None else v.shape), v.clone(), sums.clone(), top.clone()
    inputs, layout = _prepared(arguments)[::2]
    found = [_sums(block, layout) for block, _ in inputs.blocks(NUMBERS)]
    y, past, last = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    del found
    y = torch.addcmul(y, past, _of_past(inputs, layout))
    if inputs.skip is not None:
        y = torch.addcmul(y, inputs.skip[..., None, None], inputs.x)
    highest = None if inputs.shift is None else inputs.shift.flatten(2)
    shown = read_of_sums(y.flatten(2, 3).unbind(-1), highest, inputs.beta, layout.padding)
    kind: Any = {"dtype": wide_dtype(v), "memory_format": torch.contiguous_format}
    mean, *free, log_total = (x.permute(1, 2, 0)[:, : v.shape[1]].to(**kind) for x in shown)
    last = last.permute(1, 3, 2, 0).to(sums.dtype)  # [B, S, N, C]
    if highest is None:
        last = torch.cat([last, torch.zeros_like(sums[:, 2:])], 1)
        return mean, v.new_empty(0, 0, 0), log_total, last, top.clone()
    last_shift = last_top(highest[..., -1].mT).to(top.dtype)
    return mean, *free, log_total, last.contiguous(), last_shift.contiguous()


def _of_past(inputs: Inputs, layout: Layout) -> Tensor:
    """How much of the state before their chunk rows see, broadcasting to [C, B, J, L, S]."""
    seen = inputs.x.new_ones(1) if inputs.fade is None else F.pad(inputs.fade[..., None], (2, 0), value=1.0)
    return seen if layout.start is None else seen * (layout.segments() == 0)[..., None]


def _left(inputs: Inputs, layout: Layout) -> Tensor:
    """The streams [C, B, J, L, S] as the end of their chunk sees them, apart from the modes' decay."""
    left = inputs.x
    if inputs.to_end is not None:
        left = left.clone()
        left[..., 2].mul_(inputs.to_end)
    return left if layout.start is None else left * layout.until_the_end()


def backward(
    grads: tuple[Tensor | None, ...], arguments: tuple[Any, ...], results: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    if arguments[6].numel() == 0:
        return *(torch.zeros_like(x) if isinstance(x, Tensor) else None for x in arguments[:9]), grads[3], None
    inputs, tokens, layout = _prepared(arguments)
    given = [None if x is None else x.dtype for x in (*arguments[:8], None, arguments[9])]
    length, sums = arguments[6].shape[1], arguments[9]
    d_rate, d_pace, d_write, d_query, d_x, d_initial, d_skip, d_beta = _all_gradients(inputs, layout, grads, results)
    d_step, d_v, to_beta = _token_gradients(inputs, tokens, d_pace, d_x)
    if to_beta is not None:
        d_beta = to_beta if d_beta is None else to_beta - d_beta

    def tokens_first(x: Tensor) -> Tensor:
        return (x if layout.padding is None else x.masked_fill(layout.padding, 0))[..., :length].permute(1, 2, 0)

    def of_modes(x: Tensor) -> Tensor:
        x = x[0].flatten(1, 2)
        return (x if layout.padding is None else x.masked_fill(layout.padding[..., None], 0))[:, :length]

    d_sums = d_initial.permute(1, 3, 2, 0)
    if d_sums.shape[1] < sums.shape[1]:
        d_sums = torch.cat([d_sums, torch.zeros_like(sums[:, d_sums.shape[1] :], dtype=d_sums.dtype)], 1)
    found = (
        d_rate.mT,
        None if arguments[1] is None or d_step is None else tokens_first(d_step),
        None if d_write is None else of_modes(d_write),
        None if arguments[3] is None else of_modes(d_query),
        None if arguments[4] is None else d_query.flatten(1).mT,
        None if d_skip is None else d_skip,
        tokens_first(d_v),
        d_beta,
        None,
        d_sums,
    )
    return *(None if x is None else x.to(dtype) for x, dtype in zip(found, given, strict=True)), None


def _token_gradients(
    inputs: Inputs, tokens: Tokens, d_pace: Tensor, d_x: Tensor
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Of steps and values [C, B, T] and of beta [C], from those of pace and x: streams are the step times 1, v and
    exp(beta v - shift)."""
    values, steps, above = tokens
    d_one, d_value, *rest = d_x.flatten(2, 3).unbind(-1)
    d_step, d_v, d_beta = None, d_value if steps is None else d_value * steps, None
    if steps is not None:
        d_step = torch.addcmul(d_one, d_value, values).add_(d_pace.flatten(2))
    if rest and above is not None and inputs.beta is not None:
        if d_step is not None:
            d_step = d_step.addcmul_(rest[0], above)
        d_energy = rest[0] * inputs.x[..., 2].flatten(2)
        d_v, d_beta = torch.addcmul(d_v, d_energy, inputs.beta), (d_energy * values).sum((1, 2))
    return d_step, d_v, d_beta


def _all_gradients(
    inputs: Inputs, layout: Layout, grads: tuple[Tensor | None, ...], results: tuple[Tensor, ...]
) -> list[Any]:
    """Of the first six inputs, of skip, and minus that of beta through the division."""
    x = inputs.x
    to_y, to_beta = _read_gradients(inputs, layout, grads, results)
    last = torch.zeros_like(inputs.initial) if grads[3] is None else grads[3].permute(3, 0, 2, 1).to(x.dtype)
    blocks = inputs.blocks(BACKWARD_NUMBERS, to_y, last[..., : x.shape[-1]])
    later = x.new_ones(layout.size, layout.size).triu()
    found = [_gradients(block, layout, later, *more) for block, more in blocks]
    together: list[Any] = []
    for whole, *parts in zip(inputs[:6], *found, strict=True):
        shared = whole is not None and whole.shape[0] == 1  # by all blocks
        known = [part for part in parts if part is not None]
        if len(known) < 2:
            together.append(known[0] if known else None)
        else:
            together.append(torch.stack(known).sum(0) if shared else torch.cat(known))
    d_skip = None
    if inputs.skip is not None:
        together[4] = torch.addcmul(together[4], to_y, inputs.skip[..., None, None])
        d_skip = (to_y * x).sum((1, 2, 3, 4))
    return [*together, d_skip, to_beta]


def _read_gradients(
    inputs: Inputs, layout: Layout, grads: tuple[Tensor | None, ...], results: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """Of the sums y [C, B, J, L, S], and minus that of beta, from those of mean, free energy and log total."""
    mean, free, log_total = (x.to(inputs.x.dtype) for x in results)
    length, beta, exponentials, at_mean = mean.shape[1], None, None, mean
    if inputs.beta is not None and inputs.shift is not None:
        beta, at_mean = inputs.beta[:, 0, 0], free <= mean
        shift = inputs.shift.flatten(2).permute(1, 2, 0)[:, :length]
        exponentials = (shift - torch.addcmul(log_total, beta, free)).exp()
    one_over = Inverses((-log_total).exp().masked_fill(log_total == -torch.inf, 0), exponentials)
    to_sums, to_beta = undo_read_of_sums(grads[:3], mean, free, at_mean, one_over, beta)
    del one_over, exponentials
    to_y = torch.stack([x.permute(2, 0, 1) for x in to_sums], -1)
    del to_sums
    if layout.padding is not None:
        missing = inputs.x.shape[2] * layout.size - length
        to_y = F.pad(to_y, (0, 0, 0, missing)).masked_fill(layout.padding[..., None], 0)
    return to_y.unflatten(2, (-1, layout.size)), None if to_beta is None else to_beta.sum((0, 1))


def _prepared(arguments: tuple[Any, ...]) -> tuple[Inputs, Tokens, Layout]:
    """In whole chunks, padding emptied, in `wide`. Tokens write step times 1, v and exp(beta v - shift)."""
    rate, step, write, read, weight, skip, v, beta, marks, sums, top, exclusive = arguments
    dtype = torch.promote_types(v.dtype, state_dtype(v.device))
    layout = _laid_out(marks, exclusive or skip is not None, v, *SIZES[dtype])
    missing, padding = -v.shape[1] % layout.size, layout.padding

    def tokens_last(x: Tensor) -> Tensor:
        x = F.pad(x.permute(2, 0, 1), (0, missing)).to(dtype, memory_format=torch.contiguous_format)
        return x if padding is None else x.masked_fill(padding, 0)

    def by_modes(x: Tensor) -> Tensor:
        x = F.pad(x.to(dtype), (0, 0, 0, missing)) if missing else x.to(dtype)
        x = x if padding is None else x.masked_fill(padding[..., None], 0)
        return x.unflatten(1, (-1, layout.size))[None]

    rates, values = wide(rate).mT, tokens_last(v)
    steps = None
    if step is not None:
        steps = tokens_last(step)
    elif padding is not None:
        steps = (~padding).to(dtype)[None]
    pace = values.new_ones(1, 1, layout.size) if steps is None else steps
    streams = [values.new_ones(()) if steps is None else steps, values if steps is None else steps * values]
    streams[0] = streams[0].expand_as(values)
    shift = drift = fade = above = to_end = None
    warmth, skips = (None if x is None else wide(x)[:, None, None] for x in (beta, None if exclusive else skip))
    if warmth is not None:
        exponent, slowest = warmth * values, rates.amax(-1)[:, None, None]
        slowest = (slowest if steps is None else steps * slowest).clamp_min(layout.least)
        highest, first = running_shift(exponent, slowest, top.to(dtype).mT, padding, layout.start)
        above = exponent - highest
        del exponent, slowest
        above = (above if padding is None else above.masked_fill(padding, 0)).exp()
        streams.append(above if steps is None else steps * above)
        shift = highest.unflatten(-1, (-1, layout.size))
        before = torch.cat([first, shift[..., :-1, -1]], -1)[..., None]
        drift = F.pad((before - shift[..., -1:])[..., None], (2, 0))
        # From a token to its chunk's end, and from the chunk before to the token.
        to_end, fade = torch.stack([shift - shift[..., -1:], before - shift]).clamp_max(layout.most).exp()
    tokens = Tokens(values, steps, above)
    x = torch.stack(streams, -1).unflatten(2, (-1, layout.size))
    del streams
    if layout.start is not None:
        segments = layout.segments()
        drift = (x.new_zeros(1) if drift is None else drift).expand(*x.shape[:3], 1, x.shape[-1])
        drift = drift.masked_fill((segments[..., -1] > 0)[..., None, None], -torch.inf)
    pace = pace.unflatten(-1, (-1, layout.size))
    if steps is None and not (write is read is None):
        pace = pace.expand(-1, *x.shape[1:4])
    query = wide(weight).mT[:, None, None, None] if read is None else by_modes(read)
    initial = wide(sums[:, : x.shape[-1]]).permute(3, 0, 2, 1)
    writes = None if write is None else by_modes(write)
    return Inputs(rates, pace, writes, query, x, initial, shift, drift, to_end, fade, skips, warmth), tokens, layout


def _laid_out(marks: Tensor | None, strictly: bool, v: Tensor, size: int, least: float, most: float) -> Layout:
    size = min(size, v.shape[1])
    hidden = v.new_ones(size, size, dtype=torch.bool).triu(0 if strictly else 1)
    missing = -v.shape[1] % size
    if marks is None and not missing:
        return Layout(None, None, hidden, size, least, most)
    marks = v.new_zeros(v.shape[:2], dtype=torch.int8) if marks is None else marks
    marks = F.pad(marks, (0, missing), value=PADDING)
    layout = Layout(is_padding(marks), is_start(marks), hidden, size, least, most)
    segments = layout.segments()
    return layout._replace(hidden=(hidden | (segments[..., None] != segments[..., None, :]))[None])


class Factors(NamedTuple):
    """Of a block of channels: P and Q, without the axes B and J where all chunks are alike, whose letters in products
    are `modes`; the decays from a chunk's begin to its middle and on to its end, and the log decay over all of it,
    [C, B, J, N, 1]."""

    modes: str
    p: Tensor
    q: Tensor
    begin: Tensor
    end: Tensor
    fall: Tensor


def _factors(inputs: Inputs, layout: Layout) -> tuple[Factors, Tensor]:
    """And exp(G), which is as large as P and Q."""
    rates, pace, write, query = inputs[:4]
    reach = (pace[..., None] * rates[:, None, None, None]).clamp_min(layout.least).cumsum(-2)
    start, fall = reach[..., layout.size // 2, None, :].clone(), reach[..., -1:, :].clone()
    reach = reach - start
    middle = reach.exp()
    del reach
    q = _keys(middle, write)
    p = middle * query
    end = (fall - start).exp().mT
    if _is_alike(inputs):
        middle, p, q = (each[:, 0, 0] for each in (middle, p, q))
    return Factors("cln" if _is_alike(inputs) else "cbjln", p, q, start.exp().mT, end, fall.mT), middle


def _pairs(modes: str, p: Tensor, q: Tensor, inputs: Inputs, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """P Q where it is seen [C, B, J, L, L], and the decay of exponentials beside it."""
    seen = p @ q.mT
    seen = (seen[:, None, None] if modes == "cln" else seen).masked_fill(layout.hidden, 0)
    if inputs.shift is None:
        return seen, None
    above = inputs.shift[..., None, :] - inputs.shift[..., None]
    return seen, above.clamp_max_(layout.most).exp_()


def _keys(middle: Tensor, write: Tensor | None) -> Tensor:
    return middle.reciprocal() if write is None else write / middle


def _sums(inputs: Inputs, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """What rows read of their chunk and of the state before it [C, B, J, L, S], and the last modes [C, B, N, S]."""
    modes, p, q, begin, end, fall = _factors(inputs, layout)[0]
    # What is not needed any more goes at once: it is large.
    written = torch.einsum(f"{modes},cbjls->cbjns", q, _left(inputs, layout)) * end
    del end
    pairs = _pairs(modes, p, q, inputs, layout)
    del q
    y = _of_pairs(modes, *pairs, inputs.x, "is->cbjts")
    del pairs
    h = _recurrence(fall, inputs.drift, torch.cat([inputs.initial[:, :, None], written], 2), layout)
    del written
    return y, torch.einsum(f"{modes},cbjns->cbjls", p, h[:, :, :-1] * begin), h[:, :, -1].clone()


def _of_pairs(modes: str, pairs: Tensor, fade: Tensor | None, x: Tensor, letters: str) -> Tensor:
    """Pairs times streams: letters "is->cbjts", or "ts->cbjis" from rows back to tokens."""
    axes, each = ("cti", pairs[:, 0, 0]) if modes == "cln" else ("cbjti", pairs)
    y = torch.einsum(f"{axes},cbj{letters}", each, x[..., :2])
    if fade is None:
        return y
    return torch.cat([y, torch.einsum(f"cbjti,cbj{letters}", pairs * fade, x[..., 2:])], -1)


def _gradients(inputs: Inputs, layout: Layout, later: Tensor, to_y: Tensor, to_last: Tensor) -> list[Tensor | None]:
    """Of the inputs up to the modes before the first token, for a block of channels; the last modes' is to_last. later
    [L, L]: one for i >= t, else zero."""
    rates, pace, write, query, x, initial = inputs[:6]
    (modes, p, q, begin, end, fall), middle = _factors(inputs, layout)
    pairs, fade = _pairs(modes, p, q, inputs, layout)
    d_x = _of_pairs(modes, pairs, fade, to_y, "ts->cbjis")
    to_pairs = torch.einsum(f"cbjts,cbjis->{'cti' if modes == 'cln' else 'cbjti'}", to_y[..., :2], x[..., :2])
    if fade is not None:
        more = fade.mul_(to_y[..., 2:]).mul_(x[..., 2:].mT).sum_to_size(pairs.shape)
        to_pairs.add_(more.view_as(to_pairs))
        del more
    to_pairs = to_pairs.view_as(pairs).masked_fill_(layout.hidden, 0).view_as(to_pairs)
    # What is not needed any more, or is soon made again, goes at once: these are the largest of all tensors.
    del pairs, fade
    left, to_past = _left(inputs, layout), to_y * _of_past(inputs, layout)
    written = torch.einsum(f"{modes},cbjls->cbjns", q, left).mul_(end)
    to_before = torch.einsum(f"{modes},cbjls->cbjns", p, to_past).mul_(begin)
    del p, q
    # The gradients of the modes before each chunk are the same recurrence backwards: both at once, from the first and
    # from the last modes.
    written = torch.cat([initial[:, :, None], written], 2)
    to_before = torch.cat([to_before, to_last[:, :, None]], 2)
    to_before = to_before.flip(2)
    h = torch.stack([written, to_before])
    del written, to_before
    fall = torch.stack([fall, fall.flip(2)])
    drift = None if inputs.drift is None else torch.stack([inputs.drift, inputs.drift.flip(2)])
    h = _recurrence(fall, drift, h, layout)
    d_initial, to_end = h[1, :, :, -1].clone(), h[1, :, :, :-1].flip(2)
    across = (h[0, :, :, 1:] * to_end).sum_to_size(begin.shape)  # what flows across chunks' ends
    past, to_end = h[0, :, :, :-1] * begin, to_end.mul_(end)
    del h, fall, drift, begin, end
    q = _keys(middle, write)
    _add_left(d_x, torch.einsum(f"{modes},cbjns->cbjls", q, to_end), inputs, layout)
    d_p = torch.einsum(f"cbjls,cbjns->{modes}", to_past, past)
    d_p.view(-1, *d_p.shape[-2:]).baddbmm_(to_pairs.flatten(0, -3), q.flatten(0, -3))
    del q, past, to_past
    d_p = d_p.mul_(middle)
    d_p = d_p[:, None, None] if modes == "cln" else d_p
    d_query = d_p.sum_to_size(query.shape)
    # A gate's gradient is what flows across it: to later tokens of its chunk and across the chunk's end.
    flow = d_p * query if d_query.shape == d_p.shape else d_p.mul_(query)
    del d_p
    d_q = torch.einsum(f"cbjls,cbjns->{modes}", left, to_end)
    p = middle * (query[:, 0, 0] if modes == "cln" else query)
    d_q.view(-1, *d_q.shape[-2:]).baddbmm_(to_pairs.mT.flatten(0, -3), p.flatten(0, -3))
    del p, to_end, to_pairs
    d_q = d_q.div_(middle)
    del middle
    d_q = d_q[:, None, None] if modes == "cln" else d_q
    d_write = None if write is None else d_q.sum_to_size(write.shape)
    flow = flow.sub_(d_q) if write is None else flow.addcmul_(d_q, write, value=-1)
    del d_q
    flow = (later @ flow).add_(across.mT)
    flow = flow.masked_fill_(pace[..., None] * rates[:, None, None, None] < layout.least, 0)
    d_pace = torch.einsum("cbjln,cn->cbjl", flow, rates).sum_to_size(pace.shape)
    d_rates = torch.einsum("cbjln,cbjl->cn", flow, pace.expand(flow.shape[:-1]))
    return [d_rates, d_pace, d_write, d_query, d_x, d_initial]


def _add_left(d_x: Tensor, d_left: Tensor, inputs: Inputs, layout: Layout) -> None:
    """To the gradient of x that through `_left`."""
    d_left = d_left if layout.start is None else d_left * layout.until_the_end()
    d_x[..., :2].add_(d_left[..., :2])
    if inputs.to_end is not None:
        d_x[..., 2].addcmul_(d_left[..., 2], inputs.to_end)


def _recurrence(fall: Tensor, drift: Tensor | None, x: Tensor, layout: Layout) -> Tensor:
    """The modes x [..., 1 + J, N, S], those before the first chunk and what chunks write, summed along J with the log
    decays fall + drift [..., J, N, S]; in place of x where that is possible."""
    if fall.shape[-3] > 1:  # the first one has nothing before it
        fall = F.pad(fall, (0, 0, 0, 0, 1, 0))
    log_decay = fall if drift is None else fall + F.pad(drift, (0, 0, 0, 0, 1, 0))
    flat = [y.flatten(-2).flatten(0, -3) for y in (log_decay.expand_as(x), x)]
    del fall, log_decay
    return scan(*flat, resets=layout.start is not None, spare=True).view(x.shape)
