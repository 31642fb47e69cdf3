"""Decayed linear attention with a free-energy read.

    weight of token i at t:  s_t(i) = sum_m q_t[m] k_i[m] exp(gate_{i+1}[m] + ... + gate_t[m]),   q, k >= 0, gate <= 0
    p_t = s_t / sum_i s_t(i),   mean = E_p[v],   free = log E_p[exp(beta v)] / beta,   log_total = log sum_i s_t(i)

Axes: B batch, T tokens, H heads, G key/value heads, E key channels, D value channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from femixer.kernels.check import Tolerance
from femixer.kernels.marks import PADDING, START, is_padding, is_start
from femixer.kernels.operator import declared, wide_dtype
from femixer.kernels.reading import state_dtype


class FastWeights(NamedTuple):
    """State: decayed sums [B, G, E, 2 D + 1 or D + 1] of k_i (v_i, 1, exp(beta v_i - top)), and top [B, G, D].

    In the type of `state_dtype`. The largest exponential of each value channel is one; top is a constant for gradients.
    """

    sums: Tensor
    top: Tensor


# The internal result is which heads [B, H] were read again.
@declared(outputs=6, internal=1)
def decayed_linear_read(
    q: Tensor,
    k: Tensor,
    gate: Tensor | None,
    v: Tensor,
    beta: Tensor | None,
    marks: Tensor | None = None,
    sums: Tensor | None = None,
    top: Tensor | None = None,
    exclusive: bool = False,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """mean, free [B, T, H, D] (free empty without beta); log_total [B, T, H]; sums and top of the state after the last
    token, empty unless they are to be kept. In float32 or better.

    q [B, T, H, E]; k [B, T, G, E]; gate [B, T, G, E or 1]; v [B, T, G, D]; beta [G, D]; marks [B, T], see
    femixer.kernels.marks. sums, top: the state before the tokens, None for an empty one. exclusive: a token reads those
    before it, decayed by its own gate. Where a token sees nothing, and at padding, mean and free are zero and log_total
    is -inf.
    """
    batch, _, heads, channels = q.shape
    groups, width = v.shape[2:]
    mean = v.new_empty(*q.shape[:3], width, dtype=wide_dtype(v))
    free = mean.new_empty(0, 0, 0, 0) if beta is None else torch.empty_like(mean)
    columns = width + 1 if beta is None else 2 * width + 1
    wide = state_dtype(v.device)
    last = v.new_empty((batch, groups, channels, columns) if keep else 0, dtype=wide)
    last_top = v.new_empty((batch, groups, width) if keep else 0, dtype=wide)
    again = v.new_empty(batch, heads, dtype=torch.bool)
    return mean, free, mean.new_empty(q.shape[:3]), last, last_top, again  # type: ignore[return-value]


OPERATOR = decayed_linear_read.operator


# Exponents beta v reach 2000 in the examples, of which a float32 F keeps no more digits for the backward.
TOLERANCES = {torch.float32: Tolerance(1e-5, 1e-3)}


def definition(*arguments: Any) -> tuple[Tensor, ...]:
    """Token by token in float64, with sums of exponentials as logarithms."""
    q, k, gate, v, beta, marks, sums, top, exclusive, keep = arguments
    (batch, length, groups, width), channels, repeats = v.shape, k.shape[3], q.shape[2] // v.shape[2]
    marks = v.new_zeros(batch, length, dtype=torch.int8) if marks is None else marks
    real, start = ~is_padding(marks)[..., None, None], is_start(marks)[..., None, None, None]
    gate = torch.zeros_like(k) if gate is None else gate.expand_as(k)
    q, k, gate, v = (torch.where(real, x.double(), 0) for x in (q, k, gate, v))
    temperature = v.new_ones(groups, width) if beta is None else beta.double()
    top = v.new_full((batch, groups, width), -torch.inf) if top is None else top.detach()  # a constant
    state = v.new_zeros(batch, groups, channels, 2 * width + 1) if sums is None else sums.double()
    # Sums of (v, 1), and logarithms of those of exp(beta v).
    linear, log_exps = state[..., : width + 1], _log(state[..., width + 1 :]) + top.clamp(min=NOTHING)[:, :, None]
    if beta is None:
        log_exps = v.new_full((batch, groups, channels, width), NOTHING)
    reads = []
    for t in range(length):
        decay, key = gate[:, t, ..., None], k[:, t, ..., None]
        linear = torch.where(start[:, t], 0, linear) * decay.exp()
        log_exps = torch.where(start[:, t], NOTHING, log_exps) + decay
        before = linear, log_exps
        linear = linear + key * F.pad(v[:, t], (0, 1), value=1.0)[:, :, None]
        log_exps = torch.logaddexp(log_exps, _log(key) + (temperature * v[:, t])[:, :, None])
        seen = before if exclusive else (linear, log_exps)
        sums_seen, logs_seen = (x.repeat_interleave(repeats, 1) for x in seen)
        read = (q[:, t, :, None] @ sums_seen)[:, :, 0]
        nothing = read[..., -1:] <= 0
        total = torch.where(nothing, 1, read[..., -1:])
        energy = (_log(q[:, t, ..., None]) + logs_seen).logsumexp(2) - total.log()
        mean, free = read[..., :-1] / total, energy / temperature.repeat_interleave(repeats, 0)
        values = (mean, free, total.log())
        reads.append([torch.where(nothing, x, y) for x, y in zip((0, 0, -torch.inf), values, strict=True)])
    nothing = q.new_empty(0)
    mean, free, log_total = (torch.stack(x, 1) for x in zip(*reads, strict=True))
    results = mean, q.new_empty(0, 0, 0, 0) if beta is None else free, log_total[..., 0]
    if not keep or beta is None:
        return *results, *((linear, top) if keep else (nothing, nothing)), nothing
    largest = log_exps.detach().amax(2).clamp(min=NOTHING / 2)
    sums = torch.cat([linear, (log_exps - largest[:, :, None]).exp()], -1)
    return *results, sums, torch.where(largest > NOTHING / 2, largest, -torch.inf), nothing


# The logarithm of nothing, where an infinity would make NaN of a difference.
NOTHING = -1e30


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1).log(), NOTHING)


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
