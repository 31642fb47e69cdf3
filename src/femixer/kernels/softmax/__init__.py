"""The read under the softmax prior.

    p_t(i) = softmax_i(scale <q_t, k_i> + bias_ti)  over the keys i that t sees
    mu_t = sum_i p_t(i) v_i,    F_t = log(sum_i p_t(i) exp(beta v_i)) / beta   per channel

Axes: B batch, T queries, S keys, H heads, G key/value heads (H = G * repeats), E key width, D value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from femixer.kernels.operator import Operator


def _results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    bias: Tensor | None,
    segments_q: Tensor | None,
    segments_k: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """mean and free energy [B, T, H, D]; internal: log-normalizers [B, H, T], heads that were read again [B, H], top
    and base of the exponentials [B, 1, G, D]. Without beta there is no free energy, top and base: empty."""
    batch, length, heads = q.shape[:3]
    mean = q.new_empty(batch, length, heads, v.shape[3])
    free, top, base = (
        q.new_empty(0 if beta is None else shape)
        for shape in (mean.shape, (batch, 1, *v.shape[2:]), (batch, 1, *v.shape[2:]))
    )
    again = q.new_empty(batch, heads, dtype=torch.bool)
    return mean, free, q.new_empty(batch, heads, length), again, top, base


OPERATOR = Operator(__name__, _results, outputs=6, internal=4)


def softmax_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    bias: Tensor | None = None,
    decays: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mean and free energy [B, T, H, D] of v under softmax(q k * scale + bias); the free energy only if beta is given.

    q [B, T, H, E]; k [B, S, G, E]; v [B, S, G, D]; beta [G, D] > 0. Causal queries are the last T of the S tokens.
    window: a query sees keys less than `window` real tokens away. bias: broadcastable to [B, H, T, S];
    or decays [B, H, 2 S], sums of log decays before each token and up to it, best in float64: the bias is the sum of
    those after the key up to the query, or from the query to before the key.
    segments: (of queries [B, T], of keys [B, S]) integers; a query sees the keys of its own segment; negative is
    padding, whose reads are zero. scale: E^-1/2 if None.
    """
    if q.shape[0] == 0 or q.shape[1] == 0:
        nothing = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return nothing, None if beta is None else nothing
    assert bias is None or decays is None
    if bias is not None:
        decays = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    of_queries, of_keys = (None, None) if segments is None else segments
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mean, free, *_ = OPERATOR(q, k, v, beta, decays, of_queries, of_keys, causal, window, scale)
    return mean, None if beta is None else free


def reading_dtype(v: Tensor, beta: Tensor | None) -> torch.dtype:
    """Exponentials and their logarithm are float32 or better; the mean alone is read in the type of the values, as
    attention reads it, but on a CPU, where half precision is not faster."""
    if beta is None and v.device.type != "cpu":
        return v.dtype
    return torch.promote_types(v.dtype, torch.float32)


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """All weights in float64, then mean and log-sum-exp."""
    q, k, v, beta, bias, segments_q, segments_k, causal, window, scale = arguments
    (t, heads), (s, groups) = q.shape[1:3], k.shape[1:3]
    k, v = (x.double().repeat_interleave(heads // groups, 2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q.double(), k) * scale
    if bias is not None:
        scores = scores + (_decays_between(bias.double(), t) if bias.dim() == 3 else bias.double())
    seen = visible(t, s, segments_q, segments_k, causal, window)[:, None]
    # A row that sees nothing reads zero. What is hidden is left out before the softmax, so that no gradient is NaN.
    some = seen.any(-1, keepdim=True)
    log_p = scores.masked_fill(~seen & some, -torch.inf).log_softmax(-1)
    p = log_p.exp() * some
    mean = torch.einsum("bhts,bshd->bthd", p, v)
    if beta is None:
        return mean, mean.new_empty(0)
    beta = beta.double().repeat_interleave(heads // groups, 0)
    log_p = log_p.masked_fill(~seen & some, -1e30).permute(0, 2, 3, 1)[..., None]
    free = (log_p + (beta * v)[:, None]).logsumexp(2) / beta
    return mean, free * some.transpose(1, 2)


def _decays_between(sums: Tensor, t: int) -> Tensor:
    """From sums [B, H, 2 S] of gates, those between the last t tokens and all: of i+1..t, or of t..i-1 ahead."""
    before, until = sums.chunk(2, -1)
    key = torch.arange(before.shape[-1])
    row = key[len(key) - t :]
    past, future = until[..., row, None] - until[..., None, :], before[..., None, :] - before[..., row, None]
    return torch.where(key > row[:, None], future, past)


def visible(
    t: int, s: int, segments_q: Tensor | None, segments_k: Tensor | None, causal: bool, window: int | None
) -> Tensor:
    """Which keys a query sees, bool [B or 1, T, S]."""
    key = torch.arange(s)
    row, rank = key[s - t :], key[None]
    seen = torch.ones(1, t, s, dtype=torch.bool)
    if segments_q is not None and segments_k is not None:
        seen = (segments_q[:, :, None] == segments_k[:, None]) & (segments_q >= 0)[:, :, None]
        rank = (segments_k >= 0).cumsum(1)
    if causal:
        seen = seen & (key <= row[:, None])
    if window is not None:
        seen = seen & ((rank[:, row, None] - rank[:, None]).abs() < window)
    return seen


def examples() -> dict[str, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)

    def example(
        size: float = 1.0,
        queries: int | None = None,
        *,
        length: int = 13,
        heads: int = 4,
        groups: int = 2,
        width: int = 6,
        beta: float | None = 1.0,
        bias: bool = False,
        decay: float | None = None,
        segments: bool = False,
        causal: bool = True,
        window: int | None = None,
    ) -> tuple[Any, ...]:
        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        queries = length if queries is None else queries
        q, k, v = noise(2, queries, heads, width), noise(2, length, groups, width), size * noise(2, length, groups, 5)
        of_keys = None
        if segments:
            of_keys = torch.arange(length).expand(2, -1) // torch.tensor([[5], [length]])
            of_keys = of_keys.masked_fill(torch.arange(length) % 5 == 3, -1)
            of_keys[1, :2] = -1
        added = noise(2, heads, queries, length) if bias else None
        if decay is not None:
            gates = -decay * noise(2, heads, length).abs()
            added = torch.cat([gates.cumsum(2) - gates, gates.cumsum(2)], 2)
        return (
            q,
            k,
            v,
            None if beta is None else beta * (0.5 + torch.rand(groups, 5, generator=generator)),
            added,
            None if of_keys is None else of_keys[:, length - queries :],
            of_keys,
            causal,
            window,
            width**-0.5,
        )

    return {
        "causal": example(),
        "encoder": example(causal=False, groups=4),
        "one token": example(length=1),
        "mean": example(beta=None),
        "many heads": example(heads=34, length=3, causal=False),
        "longer than the kernel for short ones": example(length=71),
        "wide heads": example(width=37, causal=False),
        "window": example(window=3),
        "encoder window": example(window=3, causal=False, length=67),
        "bias": example(bias=True, groups=1),
        "segments": example(segments=True),
        "segments of a long encoder": example(segments=True, causal=False, length=67),
        "segments, window and bias": example(segments=True, window=2, bias=True),
        "decays": example(decay=0.3, length=71),
        "decays of an encoder's segments": example(decay=0.3, segments=True, causal=False),
        "decays, window and a chunk": example(decay=3.0, window=4, queries=7, groups=1),
        "decays of large values": example(100.0, decay=0.5, causal=False, beta=1.0),
        "chunk": example(queries=5),
        "chunk of segments": example(queries=7, segments=True, length=67),
        "one query": example(queries=1, length=67),
        "narrow": example(size=0.01, length=67),
        "large values": example(size=100.0),
        "huge values": example(size=5000.0, segments=True),
        "large values far apart": example(size=300.0, length=67, groups=1),
        "cold": example(size=30.0, beta=0.03, length=67),
    }
