"""Decayed linear attention in torch's operations, exact at any range, parallel over the tokens.

A token reads blocks of tokens before it, each larger than the one after it: within groups of RADIX blocks of 1, of
RADIX, of RADIX^2 tokens and so on it reads the earlier blocks of its group, up to a chunk; what was before its chunk it
reads through the state there. Every block has a shift of its own for the exponentials, the largest exponent that
reaches its end, so that no token later than the block's end decides about its digits. The parts are put together as
logarithms. The states before the chunks come from a scan over the chunks, which is done in logarithms too.

Decays are differences of sums within a chunk: from a token to the end of its block and from there to the reader, both
at most one, relative to the slowest key channel. Everything is float64.

Axes: B batch, G key/value heads, R heads that share one, T tokens, E key channels, D value channels; a block has b
tokens, a group M blocks. Tensors are [B, G, R or 1, T, ...].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start

# Blocks in a group, with one gate per head and with one per key channel; levels of groups in a chunk.
RADIX, CHANNEL_RADIX = 8, 4
CHUNK = 64
# Chunks whose decays are summed up at a time.
STRIDE = 128
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


def block_of(tokens: Tokens) -> tuple[Block, Tensor | None]:
    """Of tokens [..., b, W]; and the factors of its keys, None for ones."""
    k, _, z, reach, segment = tokens
    if k.shape[-2] == 1:
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
        x = (z - top).exp()
    return Block(times(k, factor), slow, x, top), factor


def logarithm(x: Tensor) -> Tensor:
    """log(x) of x >= 0, which is used up; NOTHING of zero. Written so that NaN propagates."""
    zero = x <= 0
    return x.masked_fill_(zero, 1).log().masked_fill_(zero, NOTHING)


class Pairs(NamedTuple):
    """Readers t of a group and the tokens i of its blocks: what readers see of blocks' ends.

    q, stream [..., group, W]; log decays far [..., M, group, 1] from a block's end to t, NOTHING where t does not see
    the block; the factors of q and k that are relative to it; scores [..., M, group, b] without far and block.slow.
    """

    q: Tensor
    stream: Tensor
    block: Block
    far: Tensor
    factors: tuple[Tensor | None, Tensor | None]
    scores: Tensor

    def decayed(self, scores: Tensor) -> Tensor:
        """scores times the decays they lack, [..., group, M b]."""
        slow = self.block.slow
        scores = scores * (self.far if slow is None else self.far + slow.mT).exp()
        return together(scores)


def together(scores: Tensor) -> Tensor:
    """[..., M, group, b] -> [..., group, M b]"""
    return scores.transpose(-2, -3).flatten(-2)


def pairs_of(q: Tensor, tokens: Tokens, size: int, radix: int, own: bool) -> Pairs:
    """Of blocks of a size, radix of them in a group. A token sees the blocks before its own, and that one if `own`."""
    blocks = tokens.grouped(-1, radix, size)
    block, k_factor = block_of(blocks)
    group = radix * size
    q = q.unflatten(3, (-1, group))
    hidden = torch.ones(radix, radix, dtype=torch.bool, device=q.device).tril(-1 if own else 0)
    hidden = hidden[:, :, None].expand(-1, -1, size).reshape(radix, group, 1)
    if blocks.segment is not None:
        hidden = hidden | (blocks.segment.flatten(4, 5)[:, :, :, :, None] != blocks.segment[..., -1:, :])
    q_factor, far = None, q.new_zeros(())
    if blocks.reach is not None:
        # At most one but for what is hidden: that lies before the block's end.
        until, end = blocks.reach.flatten(4, 5)[:, :, :, :, None], blocks.reach[..., -1:, :]
        q_factor, far = _slowest((until - end).clamp(max=0))
    far = far.masked_fill(hidden, NOTHING)
    scores = times(q[:, :, :, :, None], q_factor) @ block.k.mT
    return Pairs(q, blocks.stream.flatten(4, 5), block, far, (q_factor, k_factor), scores)


def read_level(p: Pairs) -> tuple[Tensor, Tensor | None]:
    """Sums of the streams [..., T, D + 1], and logarithms of the sums of exponentials [..., T, D]."""
    sums = (p.decayed(p.scores) @ p.stream).flatten(3, 4)
    if p.block.top is None:
        return sums, None
    terms = logarithm(p.scores.clone() if p.block.x is None else p.scores @ p.block.x) + p.block.top
    return sums, terms.add_(p.far).logsumexp(-3).flatten(3, 4)


def scan_chunks(decay: Tensor, level: Tensor) -> Tensor:
    """log sum_j exp(level_j + decay_{j+1} + ... + decay_n) of level [B, G, 1, N, E, W] and decay [..., E or 1, 1]."""
    count = level.shape[3]
    if count <= STRIDE:
        reach = decay.cumsum(3)
        return (level - reach).logcumsumexp(3) + reach
    missing = -count % STRIDE
    if missing:
        level = F.pad(level, (0, 0, 0, 0, 0, missing), value=NOTHING)
        decay = F.pad(decay, (0, 0, 0, 0, 0, missing))
    reach = decay.unflatten(3, (-1, STRIDE)).cumsum(4)
    within = (level.unflatten(3, (-1, STRIDE)) - reach).logcumsumexp(4) + reach
    ends = scan_chunks(reach[:, :, :, :, -1].clamp(min=WIPE), within[:, :, :, :, -1])
    before = F.pad(ends[:, :, :, :-1], (0, 0, 0, 0, 1, 0), value=NOTHING)
    return torch.logaddexp(within, before[:, :, :, :, None] + reach).flatten(3, 4)[:, :, :, :count]


def states_before(tokens: Tokens, chunk: int, first: Tensor | None, top: Tensor | None) -> Tensor:
    """The states before every chunk and after the last [B, G, 1, N + 1, E, 3 D + 1 or 2 D + 1] as logarithms: sums of
    the positive and negative part of v, each plus one, of 1, and of exp(beta v)."""
    chunks = tokens.grouped(-1, chunk)
    block, _ = block_of(chunks)
    v = chunks.stream[..., :-1]
    size = v.abs()
    streams = torch.cat([(size + v) / 2 + 1, (size - v) / 2 + 1, chunks.stream[..., -1:]], -1)
    streams = streams if block.slow is None else streams * block.slow.exp()
    if block.x is not None:
        streams = torch.cat([streams, block.x], -1)
    elif block.top is not None:
        streams = F.pad(streams, (0, block.top.shape[-1]), value=1.0)
    level = logarithm(block.k.mT @ streams)
    if block.top is not None:
        level = level + F.pad(block.top, (streams.shape[-1] - block.top.shape[-1], 0))
    if first is None:
        level = F.pad(level, (0, 0, 0, 0, 1, 0), value=NOTHING)
    else:
        level = torch.cat([_log_state(first, top), level], 3)
    return scan_chunks(F.pad(kept_over(chunks), (0, 0, 0, 0, 1, 0)), level)


def kept_over(chunks: Tokens) -> Tensor:
    """Log of what is left of the state over a chunk [B, G or 1, 1, N, E or 1, 1]."""
    count = chunks.k.shape[3]
    kept = chunks.k.new_zeros(1, 1, 1, count, 1, 1) if chunks.reach is None else chunks.reach[..., -1, :, None]
    if chunks.segment is not None:
        # It is forgotten if one of the chunk's tokens starts a segment.
        last = chunks.segment[..., -1:, :]
        kept = kept.masked_fill(last != F.pad(last, (0, 0, 0, 0, 1, 0))[:, :, :, :-1], WIPE)
    return kept.clamp(min=WIPE)


def _log_state(sums: Tensor, top: Tensor | None) -> Tensor:
    """A state [B, G, E, W] as `states_before` has it."""
    width = top.shape[-1] if top is not None else 0
    v, total, energies = sums[..., :width], sums[..., width : width + 1], sums[..., width + 1 :]
    size = v.abs()
    level = logarithm(torch.cat([(size + v) / 2 + total, (size - v) / 2 + total, total, energies], -1))
    if energies.shape[-1] and top is not None:
        level = level + F.pad(top.detach().clamp(min=NOTHING), (2 * width + 1, 0))[:, :, None]
    return level[:, :, None, None]


def linear_state(states: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of v and 1 [..., D + 1], and the sums of exponentials [..., E, D] relative to top [..., 1, D]."""
    plus, minus, total, energies = states.split([width, width, 1, states.shape[-1] - 2 * width - 1], -1)
    top = energies.detach().amax(-2, keepdim=True)
    return torch.cat([plus.exp() - minus.exp(), total.exp()], -1), (energies - top).exp(), top


class Readers(NamedTuple):
    """Tokens as readers of the state before their chunk: q and its factors [..., C, E], relative to the slowest key
    channel, and the log of that one's decay since the chunk's beginning, NOTHING where a segment starts in between."""

    q: Tensor
    factor: Tensor | None
    far: Tensor


def readers_of(q: Tensor, tokens: Tokens, chunk: int) -> Readers:
    q = q.unflatten(3, (-1, chunk))
    _, _, _, reach, segment = tokens.grouped(-1, chunk)
    factor, far = (None, q.new_zeros(())) if reach is None else _slowest(reach)
    if segment is not None:
        before = F.pad(segment[..., -1:, :], (0, 0, 0, 0, 1, 0))[:, :, :, :-1]
        far = far.masked_fill(segment != before, NOTHING)
    return Readers(times(q, factor), factor, far)


def read_past(readers: Readers, states: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """What tokens read of the states [..., N, E, W] before their chunks, as `read_level` has it."""
    sums, energies, top = linear_state(states, width)
    read = ((readers.q @ sums) * readers.far.exp()).flatten(3, 4)
    if not energies.shape[-1]:
        return read, None
    return read, (logarithm(readers.q @ energies) + (top + readers.far)).flatten(3, 4)


def _wide(x: Tensor) -> Tensor:
    """In float64, and side by side in memory, which every product would otherwise copy."""
    return x.to(torch.float64, memory_format=torch.contiguous_format)


def arranged(
    k: Tensor, gate: Tensor | None, v: Tensor, beta: Tensor | None, marks: Tensor | None, length: int, chunk: int
) -> Tokens:
    """Tokens, padded to a length of whole chunks with tokens of no weight."""
    k, v = (_wide(x.transpose(1, 2)[:, :, None]) for x in (k, v))
    z = None if beta is None else beta.double()[:, None, None] * v
    gate = None if gate is None else _wide(gate.transpose(1, 2)[:, :, None])
    missing, segment = length - k.shape[3], None
    if marks is not None:
        padding = is_padding(marks)[:, None, None, :, None]
        k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        z = None if z is None else z.masked_fill(padding, NOTHING)
        gate = None if gate is None else gate.masked_fill(padding, 0)
        segment = F.pad(is_start(marks), (0, missing)).cumsum(1)[:, None, None, :, None]
    stream = F.pad(v, (0, 1), value=1.0)
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
    x = _wide(x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4))
    return F.pad(x, (0, 0, 0, missing)) if missing else x
