"""Linear attention with decays, unnormalized, chunk by chunk: matrix products within a chunk, a state between.

    S_t = exp(gate_t) * S_{t-1} + k_t v_tᵀ,    y_t = S_tᵀ q_t   (exclusive: y_t = S_{t-1}ᵀ q_t)

q and k have any sign; gate <= 0 is one log decay per head, one per key channel, one per value channel, or none. Decays
are differences of sums within a chunk and at most one; nothing is divided by a product of decays. In float32 on a CPU
decays per channel run token by token in a compiled kernel instead, where there is one.

Axes: B batch, T tokens, H heads, E key width, D value width; N chunks of C tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.backend import compiled
from femixer.kernels.outer_products import outer_products
from femixer.kernels.precision import without_autocast
from femixer.layout import Layout

# Tokens in a chunk; with decays per channel, and of those the tokens whose decays are computed pair by pair, which are
# [C, C, E] numbers: between blocks of them decays are products.
CHUNK, CHANNEL_CHUNK, BLOCK = 64, 32, 4


class Decay(NamedTuple):
    """Decays within the chunks: `until` [B, H, N, C, 1 or E] sums of the gates up to a token, itself included, float64;
    `gate` that token's own; `segment` [B, 1, N, C] numbers of the segments within the chunk, from 0 for what continues
    the chunk before. Each is None where there is none."""

    until: Tensor | None
    gate: Tensor | None
    segment: Tensor | None
    seen: Tensor

    def scores(self, q: Tensor, k: Tensor, exclusive: bool = False) -> Tensor:
        """[B, H, N, C, C]: <q_t, exp(gate_{i+1} + ... + gate_t) k_i> for i <= t; exclusive: gates up to t-1, i < t."""
        hidden = self._hidden(exclusive)
        if self.until is None:
            return (q @ k.mT).masked_fill(hidden, 0)
        if self.until.shape[-1] > 1:
            return self._channel_scores(q, k, exclusive).masked_fill(hidden, 0)
        reach = self._reach(exclusive)[..., None, :]
        return (q @ k.mT) * decays(reach, self.until[..., None, :, :], hidden[..., None], q.dtype)[..., 0]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, N, C, D]: sum_{i<=t} <q_t, k_i> exp(gate_{i+1} + ... + gate_t) * v_i with gates of value channels."""
        size = _block(v.shape[3])
        scores = (q @ k.mT).masked_fill(self._hidden(False), 0)
        within = scores.unflatten(3, (-1, size)).unflatten(5, (-1, size)).diagonal(0, 3, 5).movedim(-1, 3)
        weights = within[..., None] * self._pairs(size, False, v.dtype)
        y = (weights * v.unflatten(3, (-1, size))[..., None, :, :]).sum(-2)
        while size < v.shape[3]:
            later, earlier = self._across(size, False, v.dtype)
            across = scores.unflatten(3, (-1, 2, size)).unflatten(6, (-1, 2, size))
            across = across[..., 1, :, :, 0, :].diagonal(0, 3, 5).movedim(-1, 3)
            first, second = y.unflatten(3, (-1, 2)).unbind(4)
            y = torch.cat([first, second + later * (across @ (earlier * _halves(v, size)[0]))], -2)
            size *= 2
        return y.squeeze(3)

    def reading(self, q: Tensor, exclusive: bool = False) -> Tensor:
        """q as it reads the state before the chunk [B, H, N, C, E]."""
        if self.until is not None:
            q = q * self._reach(exclusive).exp().to(q.dtype)
        return q if self.segment is None else q.masked_fill((self.segment != 0)[..., None], 0)

    def writing(self, k: Tensor) -> Tensor:
        """k as it enters the state after the chunk [B, H, N, C, E]."""
        if self.until is not None:
            k = k * (self.until[..., -1:, :] - self.until).exp().to(k.dtype)
        return k if self.segment is None else k.masked_fill((self.segment != self.segment[..., -1:])[..., None], 0)

    def keeping(self, dtype: torch.dtype) -> Tensor | None:
        """What is left of the state over each chunk: factors [B, H, N, 1 or E, 1]."""
        kept = None if self.until is None else self.until[..., -1, :, None].exp().to(dtype)
        if self.segment is None:
            return kept
        same = (self.segment[..., -1] == 0).to(dtype)[..., None, None]
        return same if kept is None else kept * same

    def chunks(self, start: int, stop: int) -> Decay:
        """The same for some of the chunks."""
        until, gate, segment = (None if x is None else x[:, :, start:stop] for x in self[:3])
        return Decay(until, gate, segment, self.seen)

    def _reach(self, exclusive: bool) -> Tensor:
        assert self.until is not None
        assert self.gate is not None
        return self.until - self.gate if exclusive else self.until

    def _hidden(self, exclusive: bool) -> Tensor:
        """bool [C, C] or [B, 1, N, C, C]: which tokens i a token t does not see."""
        hidden = ~self.seen.tril(-1 if exclusive else 0)
        if self.segment is None:
            return hidden
        return hidden | (self.segment[..., :, None] != self.segment[..., None, :])

    def _channel_scores(self, q: Tensor, k: Tensor, exclusive: bool) -> Tensor:
        """Blocks on the diagonal, doubled until they are the chunk."""
        size = _block(q.shape[3])
        pairs = q.unflatten(3, (-1, size))[..., :, None, :] * self._pairs(size, exclusive, q.dtype)
        scores = (pairs * k.unflatten(3, (-1, size))[..., None, :, :]).sum(-1)
        while size < q.shape[3]:
            later, earlier = self._across(size, exclusive, q.dtype)
            across = (later * _halves(q, size)[1]) @ (earlier * _halves(k, size)[0]).mT
            first, second = scores.unflatten(3, (-1, 2)).unbind(4)
            scores = torch.cat([F.pad(first, (0, size)), torch.cat([across, second], -1)], -2)
            size *= 2
        return scores.squeeze(3)

    def _pairs(self, size: int, exclusive: bool, dtype: torch.dtype) -> Tensor:
        """Decays from token i to token t of blocks of a size [B, H, N, C / size, t, i, E], zero for i after t."""
        assert self.until is not None
        to, since = (x.unflatten(3, (-1, size)) for x in (self._reach(exclusive), self.until))
        ahead = ~self.seen[:size, :size].tril(-1 if exclusive else 0)
        return decays(to[..., :, None, :], since[..., None, :, :], ahead[..., None], dtype)

    def _across(self, size: int, exclusive: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decays between two neighbouring blocks as a product: from their border to a token of the later one, and from
        a token of the earlier one to the border, [B, H, N, C / (2 size), size, E] each. Neither is above one."""
        assert self.until is not None
        earlier, later = _halves(self.until, size)[0], _halves(self._reach(exclusive), size)[1]
        border = earlier[..., -1:, :]
        return (later - border).to(dtype).exp(), (border - earlier).to(dtype).exp()


class _Decays(torch.autograd.Function):
    """See `decays`. Autograd would keep and pass back several tensors of the result's size in float64."""

    @staticmethod
    def forward(to: Tensor, since: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        return (to - since).to(dtype).masked_fill(hidden, -torch.inf).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.wide = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        flow = grad * factor
        to, since = flow.sum(-2, keepdim=True), flow.sum(-3, keepdim=True).neg()
        return to.to(ctx.wide), since.to(ctx.wide), None, None


def decays(to: Tensor, since: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(to - since) of sums of gates to [..., C, 1, E] and since [..., 1, C, E]; zero where hidden [..., C, C, 1]."""
    # A compiler fuses these few operations by itself.
    return (_Decays.forward if torch.compiler.is_compiling() else _Decays.apply)(to, since, hidden, dtype)


def _block(size: int) -> int:
    """The block that grows to a chunk of a size by doubling: best where the size is a power of two."""
    while size > BLOCK and size % 2 == 0:
        size //= 2
    return size


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[B, H, N, C, W] -> two of [B, H, N, C / (2 size), size, W]: the even and the odd blocks of a size."""
    first, second = x.unflatten(3, (-1, 2, size)).unbind(4)
    return first, second


def chunk_size(gate: Tensor | None, length: int) -> int:
    """gate [B, T, H] or [B, T, H, E]."""
    if gate is None or gate.dim() == 3:
        return min(length, CHUNK)
    size = 1
    while size < min(length, CHANNEL_CHUNK):
        size *= 2
    return size


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, W] -> [B, H, N, C, W], with zeros behind the last token."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.transpose(1, 2).unflatten(2, (-1, chunk)).contiguous()


def out_of_chunks(x: Tensor, length: int) -> Tensor:
    """[B, H, N, C, W] -> [B, T, H, W]"""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


def decay_of(gate: Tensor | None, layout: Layout, chunk: int, device: torch.device) -> Decay:
    """gate [B, T, H], [B, T, H, E] or None; padding of the layout decays nothing."""
    until = gates = segment = None
    if gate is not None:
        gate = gate[..., None] if gate.dim() == 3 else gate
        if layout.padding is not None:
            gate = gate.masked_fill(layout.padding[..., None, None], 0)
        gates = in_chunks(gate.double(), chunk)
        until = gates.cumsum(3)
    if layout.starts is not None:
        starts = in_chunks(layout.starts[..., None, None].long(), chunk)[..., 0]
        segment = starts.cumsum(3)
    return Decay(until, gates, segment, torch.ones(chunk, chunk, dtype=torch.bool, device=device))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    layout: Layout,
    state: Tensor | None = None,
    exclusive: bool = False,
    of_values: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(y [B, T, H, D], state after the last token [B, H, E, D] if `keep`), both in float32 at least.

    q, k [B, T, H, E], or [B, T, 1, E] where all heads share them; v [B, T, H, D]; gate [B, T, H], [B, T, H, E] or,
    `of_values`, [B, T, H, D], with a batch of one where all sequences share it; state [B, H, E, D] before the tokens.
    exclusive and of_values exclude each other.
    """
    assert not (exclusive and of_values)
    length, dtype = v.shape[1], torch.promote_types(v.dtype, torch.float32)
    v = v.to(dtype)
    with without_autocast(v.device):
        if gate is not None and gate.dim() == 4 and dtype == torch.float32 and compiled(v):
            y, last = _token_by_token(q, k, v, gate, layout, state, exclusive, of_values)
            return y, last if keep else None
        chunk = chunk_size(gate, length)
        if layout.padding is not None:
            k = k.masked_fill(layout.padding[..., None, None], 0)
        qc, kc, vc = (in_chunks(x.to(dtype), chunk) for x in (q, k, v))
        decay = decay_of(gate, layout, chunk, v.device)
        y = decay.mixed(qc, kc, vc) if of_values else decay.scores(qc, kc, exclusive) @ vc
        # The first chunk has no past without a state, and the last one no future if no state is asked for.
        start, stop = int(state is None), vc.shape[2] - int(not keep)
        kept, added = _written(kc[:, :, :stop], vc[:, :, :stop], decay.chunks(0, stop), of_values)
        states = carry(kept, added, state)
        if start < vc.shape[2]:
            before = torch.stack(states[: vc.shape[2] - start], 2)
            past = _read(qc[:, :, start:], before, decay.chunks(start, vc.shape[2]), exclusive, of_values)
            y = y + past if start == 0 else torch.cat([y[:, :, :1], y[:, :, 1:] + past], 2)
        return out_of_chunks(y, length), states[-1] if keep else None


def _token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    layout: Layout,
    state: Tensor | None,
    exclusive: bool,
    of_values: bool,
) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = v.shape
    if state is None:
        state = v.new_zeros(batch, heads, k.shape[3], width)
    q, k, gate = (x.to(v.dtype).expand(batch, -1, heads, -1).contiguous() for x in (q, k, gate))
    marks = layout.marks()
    return outer_products(q, k, v.contiguous(), gate, marks, state.to(v.dtype).contiguous(), exclusive, of_values)


def _written(k: Tensor, v: Tensor, decay: Decay, of_values: bool) -> tuple[Tensor | None, Tensor]:
    """What each chunk leaves of the state before it, factors [B, H, N, 1 or E, 1 or D], and adds [B, H, N, E, D]."""
    kept = decay.keeping(v.dtype)
    if not of_values:
        return kept, decay.writing(k).mT @ v
    return None if kept is None else kept.mT, k.mT @ decay.writing(v)


def _read(q: Tensor, before: Tensor, decay: Decay, exclusive: bool, of_values: bool) -> Tensor:
    """What queries read of the states before their chunks [B, H, N, C, D]."""
    return decay.reading(q @ before) if of_values else decay.reading(q, exclusive) @ before


def carry(kept: Tensor | None, added: Tensor, state: Tensor | None) -> list[Tensor]:
    """The state before the chunks, if any, and those after each of them: state_n = kept_n * state_{n-1} + added_n."""
    states = [] if state is None else [state]
    for n in range(added.shape[2]):
        new = added[:, :, n]
        if states:
            new = new + (states[-1] if kept is None else kept[:, :, n] * states[-1])
        states.append(new)
    return states
