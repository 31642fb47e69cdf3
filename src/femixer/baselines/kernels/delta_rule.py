"""The delta rule with decays, chunk by chunk: a triangular solve within a chunk (WY form), a state between.

    R_t = exp(gate_t) * S_{t-1},    S_t = R_t + b_t (c_tᵀ R_t) + k_t v_tᵀ,    y_t = S_tᵀ q_t

u_t = c_tᵀ R_t is what b_t writes. Within a chunk it depends on the earlier u: (1 - A_cb) U = C S_0 + A_ck V, where
A_xy are the scores of x on earlier y and C is c as it reads the state before the chunk (Yang et al. 2024, 2406.06484).
So U, the outputs and the next state are linear in S_0, and only a matrix per chunk remains to be multiplied in order.

Axes: B batch, T tokens, H heads, E key width, D value width; N chunks of C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from femixer.baselines.kernels.chunks import Decay, chunk_size, decay_of, in_chunks, out_of_chunks
from femixer.kernels.marks import is_padding
from femixer.kernels.operator import without_autocast

CHUNK = 32
# A gate per channel must not be below this, so that the decay over a chunk and its inverse lie well within float32.
LEAST = -40.0 / CHUNK


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
    [B, T, H, E] (then at least LEAST: the caller's duty, unless it is `steep`, which costs more) or None; marks [B, T]
    (see femixer.kernels.marks); state [B, H, E, D] of the tokens before.
    """
    length = q.shape[1]
    dtype = torch.promote_types(v.dtype, torch.float32)
    with without_autocast(v.device):
        if marks is not None:
            padding = is_padding(marks)[..., None, None]
            k, b = k.masked_fill(padding, 0), None if b is None else b.masked_fill(padding, 0)
        by_channel = gate is not None and gate.dim() == 4
        chunk = chunk_size(gate, length) if by_channel and steep else min(length, CHUNK)
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
    plain = decay._replace(until=None, gate=None)
    local, reading, step, added = _within(plain, rows * reach.to(k.dtype), k * inverse, b, v)
    final = reach[..., -1, :, None].to(k.dtype)
    return Chunks(local, reading, final * step, final * added)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dim, as the keys of a delta rule must be for it to stay bounded; zero stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
