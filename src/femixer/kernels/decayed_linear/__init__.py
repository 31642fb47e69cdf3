"""Decayed linear attention with a free-energy read.

    weight of token i at t:  s_t(i) = sum_m q_t[m] k_i[m] exp(gate_{i+1}[m] + ... + gate_t[m]),   q, k >= 0, gate <= 0
    p_t = s_t / sum_i s_t(i),   mean = E_p[v],   free = log E_p[exp(beta v)] / beta,   log_total = log sum_i s_t(i)

Axes: B batch, T tokens, H heads, G key/value heads, E key channels, D value channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from femixer.kernels.check import Tolerance
from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import Operator, wide_dtype
from femixer.kernels.reading import Reading, state_dtype


class FastWeights(NamedTuple):
    """State: decayed sums [B, G, E, 2 D + 1 or D + 1] of k_i (v_i, 1, exp(beta v_i - top)), and top [B, G, D].

    In the type of `state_dtype`. The largest exponential of each value channel is one; top is a constant for gradients.
    """

    sums: Tensor
    top: Tensor


def _results(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None,
    sums: Tensor | None,
    top: Tensor | None,
    exclusive: bool,
    keep: bool,
) -> tuple[Tensor, ...]:
    """mean, free, log_total, the state's sums and top, and which heads [B, H] were read again (for the backward)."""
    batch, _, heads, channels = q.shape
    groups, width = v.shape[2:]
    mean = v.new_empty(*q.shape[:3], width, dtype=wide_dtype(v))
    free = mean.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    columns = width + 1 if beta is None else 2 * width + 1
    wide = state_dtype(v.device)
    last = v.new_empty((batch, groups, channels, columns) if keep else 0, dtype=wide)
    last_top = v.new_empty((batch, groups, width) if keep else 0, dtype=wide)
    return mean, free, mean.new_empty(q.shape[:3]), last, last_top, v.new_empty(batch, heads, dtype=torch.bool)


OPERATOR = Operator(__name__, _results, outputs=6, internal=1)


def decayed_linear_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None = None,
    state: FastWeights | None = None,
    exclusive: bool = False,
    keep: bool = True,
) -> Reading:
    """mean, free [B, T, H, D] (free None without beta); log_total [B, T, H]; state after the last token, if kept. In
    float32 or better.

    q [B, T, H, E]; k [B, T, G, E]; gate [B, T, G, E or 1]; v [B, T, G, D]; beta [G, D]; marks [B, T], see
    femixer.kernels.marks. exclusive: a token reads those before it, decayed by its own gate. Where a token sees
    nothing, and at padding, mean and free are zero and log_total is -inf.
    """
    sums, top = (None, None) if state is None else state
    mean, free, log_total, last, last_top, _ = OPERATOR(q, k, gate, v, beta, marks, sums, top, exclusive, keep)
    return Reading(mean, None if beta is None else free, log_total, FastWeights(last, last_top) if keep else None)


# Exponents beta v reach 2000 in the examples, of which a float32 F keeps no more digits for the backward.
TOLERANCES = {torch.float32: Tolerance(1e-5, 1e-3)}


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """All pairs of tokens in float64, weights as logarithms."""
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = arguments
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))  # [B, H or G, T, ...]
    top = None if top is None else top.detach()  # a constant
    (batch, groups, length, width), heads = v.shape, q.shape[1]
    gate = torch.zeros_like(k) if gate is None else gate.double().transpose(1, 2).expand_as(k)
    marks = v.new_zeros(batch, length, dtype=torch.int8) if marks is None else marks
    real, segment = ~is_padding(marks)[:, None], is_start(marks).cumsum(1)[:, None]  # [B, 1, T]
    gate, k, v = (torch.where(real[..., None], x, 0) for x in (gate, k, v))
    reach = gate.cumsum(2)
    z = torch.zeros_like(v) if beta is None else beta.double()[:, None] * v
    if sums is None or top is None:
        sums = v.new_zeros(batch, groups, k.shape[3], width + 1 if beta is None else 2 * width + 1)
        top = v.new_full((batch, groups, width), -torch.inf)

    # Weights of the past and of every token, [B, H, T, 1 + T], as logarithms.
    repeated = heads // groups
    kh, vh, zh, rh, sh, th = (x.repeat_interleave(repeated, 1) for x in (k, v, z, reach, sums.double(), top))
    seen = torch.ones(length, length, dtype=torch.bool, device=v.device).tril(-1 if exclusive else 0)
    seen = seen & (segment[..., :, None] == segment[..., None, :]) & real[..., None, :] & real[..., :, None]
    decay = torch.where(seen[..., None], rh[:, :, :, None] - rh[:, :, None], 0)  # [B, H, t, i, E]
    slowest = decay.detach().amax(-1)
    weight = torch.einsum("bhte,bhtie,bhie->bhti", q, (decay - slowest[..., None]).exp(), kh)
    log_weight = _log(torch.where(seen, weight, 0)) + slowest
    continued = (real & (segment == 0)).to(q.dtype)[..., None]
    slow = rh.detach().amax(-1, keepdim=True)
    past = (q * (rh - slow).exp() * continued) @ sh  # [B, H, T, W], times exp(slow)

    every = torch.cat([_log(past[..., width : width + 1]) + slow, log_weight], -1)
    there = (every > -torch.inf).any(-1, keepdim=True)
    log_total = torch.where(there, every, 0).logsumexp(-1, keepdim=True)
    mean = (past[..., :width] * (slow - log_total).exp() + (log_weight - log_total).exp() @ vh) * there
    free = v.new_empty(0, 0, 0, 0)
    if beta is not None:
        before = _log(past[..., width + 1 :]) + slow + torch.where(th > -torch.inf, th, 0)[:, :, None]
        terms = torch.cat([before[..., None, :], log_weight[..., None] + zh[:, :, None]], -2)  # [B, H, t, 1 + i, D]
        energy = torch.where(there[..., None], terms, 0).logsumexp(-2) - log_total
        free = (energy / beta.double().repeat_interleave(repeated, 0)[:, None] * there).transpose(1, 2)
    results = mean.transpose(1, 2), free, torch.where(there, log_total, -torch.inf)[..., 0].transpose(1, 2)
    if not keep:
        return *results, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    if not length:
        return *results, sums, top, q.new_empty(0)
    last = real & (segment == segment[..., -1:])
    before = sums.double() * (segment[..., -1:] == 0)[..., None]
    return *results, *_state(k, v, z, reach, last, before, top, beta), q.new_empty(0)


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1).log(), -torch.inf)


def _state(
    k: Tensor,
    v: Tensor,
    z: Tensor,
    reach: Tensor,
    last: Tensor,
    sums: Tensor,
    top: Tensor,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of the `last` segment [B, 1, T], and those before them."""
    width = v.shape[3]
    keys = k * (reach[:, :, -1:] - reach).exp() * last[..., None]
    kept = reach[:, :, -1].exp()
    if beta is None:
        streams = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        return keys.mT @ streams + kept[..., None] * sums, top
    highest = torch.maximum(top, torch.where(last[..., None], z, -torch.inf).amax(2)).detach()
    shift = torch.where(highest > -torch.inf, highest, 0)
    streams = torch.cat([v, torch.ones_like(v[..., :1]), (z - shift[:, :, None]).clamp(max=0).exp()], -1)
    before = torch.cat([sums[..., : width + 1], sums[..., width + 1 :] * (top - shift).exp()[:, :, None]], -1)
    after = keys.mT @ streams + kept[..., None] * before
    largest = after[..., width + 1 :].detach().amax(2)
    scale = torch.where(largest > 0, largest, 1)
    return (
        torch.cat([after[..., : width + 1], after[..., width + 1 :] / scale[:, :, None]], -1),
        torch.where(largest > 0, shift + scale.log(), -torch.inf),
    )


def examples() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {
        "tokens": example(11),
        "no gate": example(67, gates=0),
        "no gate, no beta, grouped heads": example(13, gates=0, repeats=2, beta=False),
        "exclusive": example(37, exclusive=True),
        "marks": example(131, marked=True),
        "marks, grouped heads, exclusive, kept": example(37, marked=True, repeats=2, exclusive=True, keep=True),
        "gates of channels": example(67, gates=5),
        "gates of channels, marks, grouped heads": example(29, gates=5, marked=True, repeats=2),
        "gates of channels, exclusive, no beta": example(17, gates=5, exclusive=True, beta=False),
        "values of any size": example(41, scale=300.0),
        "values of any size, gates of channels": example(23, gates=5, scale=300.0),
        "one token": example(1),
        "nothing but padding": (
            *example(5)[:5],
            torch.full((2, 5), PADDING, dtype=torch.int8),
            None,
            None,
            False,
            True,
        ),
    }
    for name, gates in (("no gate", 0), ("one gate", 1), ("gates of channels", 5)):
        before = example(7, gates=gates, scale=3.0, keep=True)
        beta, last = before[4], definition(*before)[3:5]
        for after in (example(19, gates=gates, seed=1, marked=True), example(1, gates=gates, seed=2)):
            length = after[0].shape[1]
            found[f"{length} from a state, {name}"] = (*after[:4], beta, after[5], *last, False, True)
    return found


def example(
    length: int,
    *,
    gates: int = 1,
    repeats: int = 1,
    beta: bool = True,
    marked: bool = False,
    scale: float = 1.0,
    exclusive: bool = False,
    keep: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Arguments for a sequence of this length, of prime sizes; gates: none, one, or one for each key channel."""
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    q, k = (0.01 + noise(2, length, heads, 5).relu() for heads in (3 * repeats, 3))
    v, gate = scale * noise(2, length, 3, 2), -noise(2, length, 3, gates or 1).abs()
    marks = None
    if marked:
        drawn = torch.rand(2, length, generator=random)
        marks = (drawn < 0.2).to(torch.int8) * PADDING + (drawn > 0.9).to(torch.int8) * START
    temperature = 0.3 + noise(3, 2).abs() if beta else None
    return q, k, gate if gates else None, v, temperature, marks, None, None, exclusive, keep
