"""Recurrences that are matrix products within a chunk of tokens and a state between: decays within chunks, and the
delta rule with decays.

gate <= 0 is one log decay per head, one per key channel, one per value channel, or none. Decays are differences of sums
within a chunk and at most one; nothing is divided by a product of decays.

The delta rule is a triangular solve within a chunk (WY form):

    R_t = exp(gate_t) * S_{t-1},    S_t = R_t + b_t (c_tᵀ R_t) + k_t v_tᵀ,    y_t = S_tᵀ q_t

u_t = c_tᵀ R_t is what b_t writes. Within a chunk it depends on the earlier u: (1 - A_cb) U = C S_0 + A_ck V, where
A_xy are the scores of x on earlier y and C is c as it reads the state before the chunk (Yang et al. 2024, 2406.06484).
So U, the outputs and the next state are linear in S_0, and only a matrix per chunk remains to be multiplied in order.

Axes: B batch, T tokens, H heads, E key width, D value width; N chunks of C tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.marks import is_padding, is_start
from femixer.kernels.operator import without_autocast

# Tokens in a chunk; with decays per channel, and of those the tokens whose decays are computed pair by pair, which are
# [C, C, E] numbers: between blocks of them decays are products.
CHUNK, CHANNEL_CHUNK, BLOCK = 64, 32, 4


class Decay(NamedTuple):
    """Decays within the chunks: `until` [B, H, N, C, 1 or E] sums of the gates up to a token, itself included, float64;
    `segment` [B, 1, N, C] numbers of the segments within the chunk, from 0 for what continues the chunk before. Each is
    None where there is none. `seen` [C, C]: ones."""

    until: Tensor | None
    segment: Tensor | None
    seen: Tensor

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """[B, H, N, C, C]: <q_t, exp(gate_{i+1} + ... + gate_t) k_i> for i <= t."""
        hidden = self._hidden()
        if self.until is None:
            return (q @ k.mT).masked_fill(hidden, 0)
        if self.until.shape[-1] > 1:
            return self._channel_scores(q, k).masked_fill(hidden, 0)
        to, since = self.until[..., None, :], self.until[..., None, :, :]
        return (q @ k.mT) * decays(to, since, hidden[..., None], q.dtype)[..., 0]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, N, C, D]: sum_{i<=t} <q_t, k_i> exp(gate_{i+1} + ... + gate_t) * v_i with gates of value channels."""
        size = _block(v.shape[3])
        scores = (q @ k.mT).masked_fill(self._hidden(), 0)
        within = scores.unflatten(3, (-1, size)).unflatten(5, (-1, size)).diagonal(0, 3, 5).movedim(-1, 3)
        weights = within[..., None] * self._pairs(size, v.dtype)
        y = (weights * v.unflatten(3, (-1, size))[..., None, :, :]).sum(-2)
        while size < v.shape[3]:
            later, earlier = self._across(size, v.dtype)
            across = scores.unflatten(3, (-1, 2, size)).unflatten(6, (-1, 2, size))
            across = across[..., 1, :, :, 0, :].diagonal(0, 3, 5).movedim(-1, 3)
            first, second = y.unflatten(3, (-1, 2)).unbind(4)
            y = torch.cat([first, second + later * (across @ (earlier * _halves(v, size)[0]))], -2)
            size *= 2
        return y.squeeze(3)

    def reading(self, q: Tensor) -> Tensor:
        """q as it reads the state before the chunk [B, H, N, C, E]."""
        if self.until is not None:
            q = q * self.until.exp().to(q.dtype)
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
        until, segment = (None if x is None else x[:, :, start:stop] for x in self[:2])
        return Decay(until, segment, self.seen)

    def _hidden(self) -> Tensor:
        """bool [C, C] or [B, 1, N, C, C]: which tokens i a token t does not see."""
        hidden = ~self.seen.tril()
        if self.segment is None:
            return hidden
        return hidden | (self.segment[..., :, None] != self.segment[..., None, :])

    def _channel_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Blocks on the diagonal, doubled until they are the chunk."""
        size = _block(q.shape[3])
        pairs = q.unflatten(3, (-1, size))[..., :, None, :] * self._pairs(size, q.dtype)
        scores = (pairs * k.unflatten(3, (-1, size))[..., None, :, :]).sum(-1)
        while size < q.shape[3]:
            later, earlier = self._across(size, q.dtype)
            across = (later * _halves(q, size)[1]) @ (earlier * _halves(k, size)[0]).mT
            first, second = scores.unflatten(3, (-1, 2)).unbind(4)
            scores = torch.cat([F.pad(first, (0, size)), torch.cat([across, second], -1)], -2)
            size *= 2
        return scores.squeeze(3)

    def _pairs(self, size: int, dtype: torch.dtype) -> Tensor:
        """Decays from token i to token t of blocks of a size [B, H, N, C / size, t, i, E], zero for i after t."""
        assert self.until is not None
        until, ahead = self.until.unflatten(3, (-1, size)), ~self.seen[:size, :size].tril()
        return decays(until[..., :, None, :], until[..., None, :, :], ahead[..., None], dtype)

    def _across(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decays between two neighbouring blocks as a product: from their border to a token of the later one, and from
        a token of the earlier one to the border, [B, H, N, C / (2 size), size, E] each. Neither is above one."""
        assert self.until is not None
        earlier, later = _halves(self.until, size)
        border = earlier[..., -1:, :]
        return (later - border).to(dtype).exp(), (border - earlier).to(dtype).exp()


class _Decays(torch.autograd.Function):
    """See `decays`. Autograd would pass back several tensors of the result's size in float64."""

    generate_vmap_rule = True

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


def decay_of(gate: Tensor | None, marks: Tensor | None, chunk: int, device: torch.device) -> Decay:
    """gate [B, T, H], [B, T, H, E] or None; marks [B, T]: padding decays nothing."""
    until = segment = None
    if gate is not None:
        gate = gate[..., None] if gate.dim() == 3 else gate
        if marks is not None:
            gate = gate.masked_fill(is_padding(marks)[..., None, None], 0)
        until = in_chunks(gate.double(), chunk).cumsum(3)
    if marks is not None:
        segment = in_chunks(is_start(marks)[..., None, None].long(), chunk)[..., 0].cumsum(3)
    return Decay(until, segment, torch.ones(chunk, chunk, dtype=torch.bool, device=device))


def carry(kept: Tensor | None, added: Tensor, state: Tensor | None) -> list[Tensor]:
    """The state before the chunks, if any, and those after each of them: state_n = kept_n * state_{n-1} + added_n."""
    states = [] if state is None else [state]
    for n in range(added.shape[2]):
        new = added[:, :, n]
        if states:
            new = new + (states[-1] if kept is None else kept[:, :, n] * states[-1])
        states.append(new)
    return states


# The delta rule's tokens in a chunk.
DELTA_CHUNK = 32
# A gate per channel must not be below this, so that the decay over a chunk and its inverse lie well within float32.
LEAST_GATE = -40.0 / DELTA_CHUNK


class Chunks(NamedTuple):
    """What chunks do to the state S_0 before them: y = local + reading S_0, S_next = step S_0 + added."""

    local: Tensor
    reading: Tensor
    step: Tensor
    added: Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor,
    b: Tensor | None,
    gate: Tensor | None,
    marks: Tensor | None = None,
    state: Tensor | None = None,
    steep: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y [B, T, H, D], state after the last token [B, H, E, D]), both in float32 at least.

    q, k, c, b [B, T, H, E]; b None is -k: the token erases where it writes. v [B, T, H, D]; gate <= 0 [B, T, H],
    [B, T, H, E] (then at least LEAST_GATE: the caller's duty, unless it is `steep`, which costs more) or None; marks
    [B, T] (see femixer.kernels.marks); state [B, H, E, D] of the tokens before.
    """
    length = q.shape[1]
    dtype = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v.device):
        if marks is not None:
            padding = is_padding(marks)[..., None, None]
            k, b = k.masked_fill(padding, 0), None if b is None else b.masked_fill(padding, 0)
        by_channel = gate is not None and gate.dim() == 4
        chunk = chunk_size(gate, length) if by_channel and steep else min(length, DELTA_CHUNK)
        decay = decay_of(gate, marks, chunk, v.device)
        qc, kc, vc, cc = (in_chunks(x.to(dtype), chunk) for x in (q, k, v, c))
        bc = None if b is None else in_chunks(b.to(dtype), chunk)
        chunks = (_rescaled if by_channel and not steep else _within)(decay, torch.stack([cc, qc]), kc, bc, vc)
        if state is None:
            state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
        before = []
        for step, added in zip(chunks.step.unbind(2), chunks.added.unbind(2), strict=True):
            before.append(state)
            state = step @ state + added
        y = chunks.local + chunks.reading @ torch.stack(before, 2)
        return out_of_chunks(y, length), state


def _within(decay: Decay, rows: Tensor, k: Tensor, b: Tensor | None, v: Tensor) -> Chunks:
    """rows [2, B, H, N, C, E]: c and q. What is written along b, or along k where b is None, is own + carried S_0."""
    along = k if b is None else b
    of_c, of_q = _scores(decay, rows, along)
    reading_c, reading_q = decay.reading(rows).unbind()
    written = decay.writing(along).mT
    if b is None:
        system, known = of_c, torch.cat([v, -reading_c], -1)
    else:
        besides_c, besides_q = _scores(decay, rows, k)
        system, known = -of_c, torch.cat([besides_c.tril(-1) @ v, reading_c], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, carried = solved.split((v.shape[-1], k.shape[-1]), -1)
    local, added = of_q @ own, written @ own
    if b is not None:
        local, added = local + besides_q @ v, added + decay.writing(k).mT @ v
    kept = decay.keeping(v.dtype)
    identity = torch.eye(k.shape[-1], dtype=v.dtype, device=v.device)
    step = written @ carried + (identity if kept is None else identity * kept)
    return Chunks(local, reading_q + of_q @ carried, step, added)


def _scores(decay: Decay, rows: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    if decay.until is None or decay.until.shape[-1] == 1:
        return decay.scores(rows, k).unbind()
    return tuple(decay.scores(row, k) for row in rows)


def _rescaled(decay: Decay, rows: Tensor, k: Tensor, b: Tensor | None, v: Tensor) -> Chunks:
    """The same for gates per channel: S_t / exp(gate_1 + ... + gate_t) follows the rule without decays."""
    assert decay.until is not None
    reach = decay.until.exp()
    inverse = reach.reciprocal().to(k.dtype)
    b = None if b is None else b * inverse
    plain = decay._replace(until=None)
    local, reading, step, added = _within(plain, rows * reach.to(k.dtype), k * inverse, b, v)
    final = reach[..., -1, :, None].to(k.dtype)
    return Chunks(local, reading, final * step, final * added)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dim, as the keys of a delta rule must be for it to stay bounded; zero stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
