"""Decayed linear attention in torch's operations, exact at any range, parallel over the tokens.

A token reads blocks of tokens before it, each larger than the one after it: within groups of RADIX blocks of 1, of
RADIX, of RADIX^2 tokens and so on it reads the earlier blocks of its group, up to a chunk; what was before its chunk it
reads through the state there. Every block has a shift of its own for the exponentials, the largest exponent that
reaches its end, so that no token later than the block's end decides about its digits. The parts are put together as
logarithms. The states before the chunks come from a recurrence over the chunks, relative to the largest exponent so
far.

Decays are differences of sums within a chunk: from a token to the end of its block and from there to the reader, both
at most one, relative to the slowest key channel. Everything is float64 on a CPU and
float32 elsewhere (`wide`).

Axes: B batch, G key/value heads, R heads that share one, T tokens, E key channels, D value channels; a block has b
tokens, a group M blocks. Tensors are [B, G, R or 1, T, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.reading import LOWEST, is_followed, wide
from femixer.kernels.recurrence.plain import Pairwise, scan

# Blocks in a group, with one gate per head and with one per key channel; levels of groups in a chunk.
RADIX, CHANNEL_RADIX = 8, 4
CHUNK = 64
# The logarithm of nothing, where an infinity would make NaN of a difference.
NOTHING = -1e30
# A log decay that leaves nothing of exponents up to 1e5, and yet leaves digits to those it is summed with.
WIPE = -1e6


class Tokens(NamedTuple):
    """Keys, streams (v, 1), exponents beta v, sums of the gates since the beginning of the chunk, and numbers of the
    segments [B, 1, 1, T, 1]."""

    k: Tensor
    stream: Tensor
    z: Tensor | None
    reach: Tensor | None
    segment: Tensor | None

    def grouped(self, *shape: int) -> Tokens:
        """T as groups of blocks of tokens."""
        return Tokens(*(None if x is None else x.unflatten(3, shape) for x in self))  # type: ignore[arg-type]


class Block(NamedTuple):
    """What a block's tokens are at its end: keys [..., b, E], relative to the slowest key channel; log of its decay
    [..., b, 1]; exp(beta v) with this decay relative to top [..., 1, D], None for ones."""

    k: Tensor
    slow: Tensor | None
    x: Tensor | None
    top: Tensor | None


def _slowest(decay: Tensor) -> tuple[Tensor | None, Tensor]:
    """Log decays [..., E or 1] as factors relative to the slowest key channel, None for ones, and that one's."""
    if decay.shape[-1] == 1:
        return None, decay
    slowest = decay.detach().amax(-1, keepdim=True)
    return (decay - slowest).exp_(), slowest


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def block_of(tokens: Tokens, running: Callable[[Tensor], Tensor] | None = None) -> tuple[Block, Tensor | None]:
    """Of tokens [..., b, W]; and the factors of its keys, None for ones. running: tops from the largest exponents."""
    k, _, z, reach, segment = tokens
    if k.shape[-2] == 1 and running is None:
        return Block(k, None, None, z), None
    factor = slow = x = top = None
    if reach is not None:
        factor, slow = _slowest(reach[..., -1:, :] - reach)
    if segment is not None:
        ended = segment != segment[..., -1:, :]
        z = None if z is None else z.masked_fill(ended, NOTHING)
        factor = (~ended).to(k.dtype) if factor is None else factor.masked_fill(ended, 0)
    if z is not None:
        z = z if slow is None else z + slow
        top = z.detach().amax(-2, keepdim=True)
        top = top if running is None else running(top)
        x = (z - top).exp()
    return Block(times(k, factor), slow, x, top), factor


def logarithm(x: Tensor) -> Tensor:
    """log(x) of x >= 0, or less than NOTHING of zero, which has no gradient. Written so that NaN propagates."""
    if not is_followed():
        return x.log()
    least = torch.finfo(x.dtype).tiny
    return F.threshold(x.clamp_min(least).log(), math.log(least) + 1, NOTHING)


class Pairs(NamedTuple):
    """Readers t of a group and the tokens i of its blocks: what readers see of blocks' ends.

    q, stream [..., group, W]; log decays far [..., M, group, 1] from a block's end to t, NOTHING where t does not see
    the block, or None if nothing decays: then scores are zero there; the factors of q and k that are relative to it;
    scores [..., M, group, b] without far and block.slow. hidden [M, M]: which groups of readers do not see a block.
    """

    q: Tensor
    stream: Tensor
    block: Block
    far: Tensor | None
    factors: tuple[Tensor | None, Tensor | None]
    scores: Tensor
    hidden: Tensor

    def decay(self) -> Tensor | None:
        """What the scores lack; None for ones."""
        if self.far is None:
            return None
        return (self.far if self.block.slow is None else self.far + self.block.slow.mT).exp()


def together(scores: Tensor) -> Tensor:
    """[..., M, group, b] -> [..., group, M b]"""
    return scores.transpose(-2, -3).flatten(-2)


def pairs_of(q: Tensor, tokens: Tokens, size: int, radix: int, own: bool) -> Pairs:
    """Of blocks of a size, radix of them in a group. A token sees the blocks before its own, and that one if `own`."""
    blocks = tokens.grouped(-1, radix, size)
    block, k_factor = block_of(blocks)
    group = radix * size
    q = q.unflatten(3, (-1, group))
    q_factor = None
    far = None
    if blocks.reach is not None:
        until, end = blocks.reach.flatten(4, 5)[:, :, :, :, None], blocks.reach[..., -1:, :]
        q_factor, far = _slowest(until - end)
    elif blocks.segment is not None:
        far = q.new_zeros(radix, group, 1)
    hidden = torch.ones(radix, radix, dtype=torch.bool, device=q.device).tril(-1 if own else 0)
    if far is not None:
        far = seen(far, hidden, NOTHING)
    if far is not None and blocks.segment is not None:
        far = far.masked_fill(blocks.segment.flatten(4, 5)[:, :, :, :, None] != blocks.segment[..., -1:, :], NOTHING)
    if q_factor is None:
        scores = (q @ block.k.flatten(4, 5).mT).unflatten(-1, (radix, size)).transpose(-2, -3)
    else:
        scores = (q[:, :, :, :, None] * q_factor) @ block.k.mT
    scores = seen(scores, hidden, 0.0) if far is None else scores
    return Pairs(q, blocks.stream.flatten(4, 5), block, far, (q_factor, k_factor), scores, hidden)


def seen(x: Tensor, hidden: Tensor, value: float) -> Tensor:
    """x [..., M, group, W] with a value where a token does not see a block."""
    return x.unflatten(-2, (len(hidden), -1)).masked_fill(hidden[..., None, None], value).flatten(-3, -2)


def plus_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total [..., T, W], if there is one, plus a @ b [..., groups, T / groups, W]."""
    if total is None or a.shape[:-2] != b.shape[:-2]:
        product = (a @ b).flatten(3, 4)
        return product if total is None else total + product
    rows = total.reshape(-1, a.shape[-2], b.shape[-1])
    return torch.baddbmm(rows, a.flatten(0, -3), b.flatten(0, -3)).view(total.shape)


def read_level(p: Pairs, sums: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sums of the streams [..., T, D + 1] with those so far, and logarithms of the sums of exponentials [..., T, D]."""
    sums = plus_product(sums, together(times(p.scores, p.decay())), p.stream)
    if p.block.top is None:
        return sums, None
    terms = logarithm(p.scores if p.block.x is None else p.scores @ p.block.x) + p.block.top
    return sums, (terms if p.far is None else terms.add_(p.far)).logsumexp(-3).flatten(3, 4)


class States(NamedTuple):
    """Before every chunk: sums [B, G, 1, N, E, W] of the streams (v, 1) and of exp(beta v - top) with their top
    [B, G, 1, N, E or 1, D], a constant for gradients; `after` the last one, both of them.

    decay [B, G, 1, N or N + 1, E or 1, W or 1]: the logs of what was left of the one before, without the first state if
    that is empty; scale [B, G, 1, N, E or 1, W]: what the sums of the chunks were multiplied by; pairs: of `recurrent`;
    by: tokens of the chunks as blocks, the factors of their keys, and streams (v, 1, exp(beta v - top)) at their ends.
    """

    sums: Tensor
    top: Tensor | None
    after: tuple[Tensor, Tensor | None]
    decay: Tensor
    scale: Tensor | None
    pairs: Pairwise
    by: tuple[Block, Tensor | None, Tensor]

    def last(self, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sums and top of the result, a channel's largest exponential one, and what the sums were multiplied by."""
        sums, top, factor = (None if x is None else x[:, :, 0, -1] for x in readable(*self.after))
        assert sums is not None
        if top is None:
            return sums, sums.new_full((*sums.shape[:2], width), -torch.inf), None
        largest = sums[..., width + 1 :].detach().amax(-2, keepdim=True)
        nothing = largest <= 0
        largest = largest.masked_fill(nothing, 1)
        scale = _with_ones(1 / largest, sums)
        top = (top + largest.log()).masked_fill(nothing, -torch.inf)[:, :, 0]
        return sums * scale, top, scale if factor is None else scale * factor


def readable(sums: Tensor, top: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sums with one top for all key channels, that top, and the factors that this took (None: ones)."""
    if top is None or top.shape[-2] == 1:
        return sums, top, None
    largest = top.amax(-2, keepdim=True)
    factor = _with_ones((top - largest).exp(), sums)
    return sums * factor, largest, factor


def _with_ones(factor: Tensor, sums: Tensor) -> Tensor:
    """Factors of the exponentials as those of all sums."""
    return F.pad(factor, (sums.shape[-1] - factor.shape[-1], 0), value=1.0)


def recurrent(decay: Tensor, x: Tensor, marked: bool, pairs: Pairwise, backwards: bool = False) -> Tensor:
    """The recurrence along N of x [B, G, 1, N, E, W] and log decays [..., E or 1, W or 1]; pairs: as of `scan`."""
    decay = decay.expand(*x.shape[:4], decay.shape[-2], x.shape[-1])
    h = scan(decay.flatten(0, 2), x.flatten(0, 2), resets=marked, backwards=backwards, pairs=pairs)
    return h.unflatten(0, x.shape[:3])


def states_of(chunks: Tokens, first: Tensor | None, first_top: Tensor | None) -> States:
    """The exponentials' top is the largest exponent so far, as it decays."""
    kept, given = kept_over(chunks), first is not None
    kept = F.pad(kept, (0, 0, 0, 0, 1, 0)) if given and kept is not None else kept
    top: Any = None
    decay: Any = kept
    scale = None

    def running(local: Tensor) -> Tensor:
        nonlocal top
        if first_top is not None:
            local = torch.cat([first_top.to(local.dtype).clamp(min=LOWEST)[:, :, None, None, None], local], 3)
        reach = None if kept is None else kept.detach().cumsum(3)
        top = local.cummax(3).values if reach is None else (local - reach).cummax(3).values + reach
        return top[:, :, :, given:]

    one = kept is None or kept.shape[-2] == 1  # top for all key channels, to which exponentials are relative at once
    block, factor = block_of(chunks, running if one else None)
    streams = chunks.stream if block.slow is None else chunks.stream * block.slow.exp()
    if block.top is not None:
        streams = torch.cat([streams, torch.ones_like(block.top) if block.x is None else block.x], -1)
    sums = block.k.mT @ streams
    if kept is None and block.top is None:
        decay = sums.new_zeros(1, 1, 1, sums.shape[3] + given, 1, 1)
    if block.top is not None:
        if not one:
            scale = _with_ones((block.top - running(block.top.detach())).exp(), sums)
            sums = sums * scale
        rise = F.pad(top[:, :, :, :-1] - top[:, :, :, 1:], (sums.shape[-1] - top.shape[-1], 0, 0, 0, 1, 0))
        decay = rise if kept is None else kept + rise
    if first is not None:
        sums = torch.cat([first.to(sums.dtype)[:, :, None, None], sums], 3)
    pairs: Pairwise = []
    sums = recurrent(decay, sums, chunks.segment is not None, pairs)
    after = sums[:, :, :, -1:], None if top is None else top[:, :, :, -1:]
    sums, top = sums[:, :, :, :-1], None if top is None else top[:, :, :, :-1]
    if first is None:
        sums = F.pad(sums, (0, 0, 0, 0, 1, 0))
        top = None if top is None else F.pad(top, (0, 0, 0, 0, 1, 0), value=LOWEST)
    return States(sums, top, after, decay, scale, pairs, (block, factor, streams))


def kept_over(chunks: Tokens) -> Tensor | None:
    """Log of what is left of the state over a chunk [B, G or 1, 1, N, E or 1, 1]; None for all of it."""
    kept = None if chunks.reach is None else chunks.reach[..., -1, :, None]
    if chunks.segment is not None:
        # It is forgotten if one of the chunk's tokens starts a segment.
        last = chunks.segment[..., -1:, :]
        kept = chunks.k.new_zeros(1, 1, 1, last.shape[3], 1, 1) if kept is None else kept
        kept = kept.masked_fill(last != F.pad(last, (0, 0, 0, 0, 1, 0))[:, :, :, :-1], WIPE)
    return None if kept is None else kept.clamp(min=WIPE)


# Tokens as readers of the state before their chunk: q and its factors [..., C, E], relative to the slowest key channel,
# and the log of that one's decay since the chunk's beginning, NOTHING where a segment starts in between; None for ones
# and zeros.
Readers = tuple[Tensor, Tensor | None, Tensor | None]


def readers_of(q: Tensor, tokens: Tokens, chunk: int) -> Readers:
    q = q.unflatten(3, (-1, chunk))
    _, _, _, reach, segment = tokens.grouped(-1, chunk)
    factor, far = (None, None) if reach is None else _slowest(reach)
    if segment is not None:
        far = q.new_zeros(()) if far is None else far
        before = F.pad(segment[..., -1:, :], (0, 0, 0, 0, 1, 0))[:, :, :, :-1]
        far = far.masked_fill(segment != before, NOTHING)
    return times(q, factor), factor, far


def read_past(readers: Readers, states: States, sums: Tensor) -> tuple[Tensor, Tensor | None]:
    """`sums` of the streams, as `read_level` has them, with what tokens read of the states before their chunks."""
    before, top, _ = readable(states.sums, states.top)
    read, far = readers[0] @ before, readers[2]
    linear = read[..., : sums.shape[-1]].flatten(3, 4)
    sums = sums + linear if far is None else torch.addcmul(sums, linear, far.exp().flatten(3, 4))
    if top is None:
        return sums, None
    energy = logarithm(read[..., sums.shape[-1] :]) + top
    return sums, (energy if far is None else energy + far).flatten(3, 4)


def arranged(
    k: Tensor, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None, length: int, chunk: int
) -> Tokens:
    """Tokens, padded to a length of whole chunks with tokens of no weight."""
    k, v = (wide(x.transpose(1, 2)[:, :, None]) for x in (k, v))
    gate = None if gate is None else wide(gate.transpose(1, 2)[:, :, None])
    missing, segment, padding = length - v.shape[3], None, None
    if marks is not None:
        padding = is_padding(marks)[:, None, None, :, None]
        k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        gate = None if gate is None else gate.masked_fill(padding, 0)
        segment = F.pad(is_start(marks), (0, missing)).cumsum(1)[:, None, None, :, None]
    # Products would copy whatever does not lie side by side, every time.
    k, stream = k.contiguous(), F.pad(v, (0, 1), value=1.0)
    z = None if beta is None else beta.to(v.dtype)[:, None, None] * stream[..., :-1]
    z = z if z is None or padding is None else z.masked_fill(padding, NOTHING)
    if missing:
        k, stream = (F.pad(x, (0, 0, 0, missing)) for x in (k, stream))
        z = None if z is None else F.pad(z, (0, 0, 0, missing), value=NOTHING)
        gate = None if gate is None else F.pad(gate, (0, 0, 0, missing))
    reach = None if gate is None else gate.unflatten(3, (-1, chunk)).cumsum(4).flatten(3, 4)
    return Tokens(k, stream, z, reach, segment)


def plan(length: int, gate: Tensor | None) -> tuple[list[int], int, int, int]:
    """Sizes of the blocks of every level, blocks in a group, tokens in a chunk, and in whole chunks."""
    radix = CHANNEL_RADIX if gate is not None and gate.shape[3] > 1 else RADIX
    radix = min(radix, max(length, 1))
    sizes, chunk = [1], radix
    while chunk < min(length, CHUNK):
        sizes.append(chunk)
        chunk *= radix
    return sizes, radix, chunk, -(-max(length, 1) // chunk) * chunk


def by_group(x: Tensor, groups: int, length: int) -> Tensor:
    """[B, T, H, W] -> [B, G, R, length, W], with zeros behind the last token."""
    missing = length - x.shape[1]
    x = wide(x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)).contiguous()
    return F.pad(x, (0, 0, 0, missing)) if missing else x
