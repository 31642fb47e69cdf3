"""The tensors behind one call of a mixer, computed from the dense prior by the definitions in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from femixer.free_energy import free_energy, hidden_temperature, kl_divergence, posterior
from femixer.gates import outer_gate, temperature_gate

if TYPE_CHECKING:
    from femixer.mixer import FreeEnergyMixer

# Queries are taken in blocks of so many dense numbers: that fits into a cache, and memory stays bounded.
MOST_NUMBERS = 2**18


@dataclass(frozen=True)
class Reader:
    """The mixer that an inspection is of."""

    prior: str  #: the prior's name
    parts: str
    pairs: bool  #: the prior weighs pairs of token and channel, and is shown summed over channels
    normalized: bool  #: False: the mixer reads with weights that do not sum to one
    beta_max: Tensor  #: [H, D], float32 on the CPU


@dataclass(frozen=True)
class Inspection:
    """Axes: B batch, H heads, T positions (queries, then keys), D value channels of a head."""

    prior: Tensor  #: [B, H, T, T], or [B, H, T, T, D] where it differs per channel
    posterior: Tensor  #: [B, H, T, T, D], at beta_max
    value: Tensor  #: [B, H, T, D]
    mean: Tensor  #: [B, H, T, D], E_prior[v]
    free_energy: Tensor  #: [B, H, T, D], at beta_max
    posterior_mean: Tensor  #: [B, H, T, D], E_posterior[v]
    lam: Tensor  #: [B, H, T, D], 1 where the mixer has no temperature gate, 0 where it reads the mean
    gate: Tensor  #: [B, H, T, D], 1 where the mixer has no outer gate
    read: Tensor  #: [B, H, T, D], (1 - lam) mean + lam free_energy
    hidden_beta: Tensor  #: [B, H, T, D], the temperature at which the free energy equals the read
    kl: Tensor  #: [B, H, T, D], KL(posterior at hidden_beta || prior), the prior normalized
    reader: Reader | None = None  #: the mixer, where it is one

    def plot(
        self,
        path: str | PathLike[str],
        *,
        batch: int = 0,
        head: int = 0,
        row: int = -1,
        channels: list[int] | None = None,
        tokens: list[str] | None = None,
    ) -> None:
        """Draw prior and per-channel posteriors of one head; `row` is the position whose channels are compared."""
        from femixer.inspection.figure import draw

        draw(self, path, batch=batch, head=head, row=row, channels=channels, tokens=tokens)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `femixer inspect`, for this mixer and the first sequence of the batch."""
        from femixer.inspection.page import embedded

        return embedded(self)


def inspect_mixer(
    mixer: FreeEnergyMixer, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
) -> Inspection:
    with torch.no_grad():
        (inputs, v, lam_logits, gate_logits, _), layout = mixer.prepare(x, mask, segments)

        def per_head(t: Tensor) -> Tensor:
            """[B, T, heads or kv_heads, D] -> [B, H, T, D] in float64"""
            return t.double().repeat_interleave(mixer.heads // t.shape[2], 2).transpose(1, 2)

        value, reads_free = per_head(v), "L" in mixer.parts
        found = inspect_read(
            lambda rows: mixer.prior.weights(inputs, layout, rows),
            value,
            mixer.beta_max if reads_free else None,
            torch.full_like(value, reads_free) if lam_logits is None else per_head(temperature_gate(lam_logits)),
            torch.ones_like(value) if gate_logits is None else per_head(outer_gate(gate_logits)),
            x.dtype,
            over_index=per_head(mixer.prior.over_index(v)),
            over_tokens=mixer.prior.over_tokens,
        )
    reader = Reader(
        mixer.prior_name,
        mixer.parts,
        pairs=mixer.prior.one_temperature,
        normalized=getattr(mixer.prior, "normalize", True),
        beta_max=mixer.beta_max.detach().float().cpu(),
    )
    return replace(found, reader=reader)


def inspect_read(
    weights: Callable[[Tensor], Tensor],
    value: Tensor,
    beta_max: Tensor | None,
    lam: Tensor,
    gate: Tensor,
    dtype: torch.dtype,
    *,
    over_index: Tensor | None = None,
    over_tokens: Callable[[Tensor], Tensor] = lambda p: p,
) -> Inspection:
    """The inspection, in `dtype`, of a read of value [B, H, T, D] with beta_max [H, D], None for the mean.

    weights: the prior of the queries with the given numbers. over_index, over_tokens: as in femixer.priors.base, where
    the prior is not over tokens. All in float64.
    """
    over_index = value if over_index is None else over_index
    beta = 0.0 if beta_max is None else beta_max.double()[:, None]

    def block(rows: Tensor) -> dict[str, Tensor]:
        """What some of the queries read."""
        p = weights(rows)
        p = p.expand(value.shape[0], *p.shape[1:])  # a prior that does not look at the tokens has one for all sequences
        mean, free, at_max = (
            free_energy(p, over_index, 0.0),
            free_energy(p, over_index, beta),
            posterior(p, over_index, beta),
        )
        here = lam[:, :, rows]
        hidden = torch.zeros_like(here) if beta_max is None else hidden_temperature(p, over_index, beta, here)
        total = p.sum(3, keepdim=True)
        normalized = p / torch.where(total > 0, total, 1.0)
        result = {
            "prior": over_tokens(p),
            "posterior": over_tokens(at_max),
            "mean": mean,
            "free_energy": free,
            "posterior_mean": torch.einsum("bhtsd,bhsd->bhtd", at_max, over_index),
            "read": torch.lerp(mean, free, here),
            "hidden_beta": hidden,
            "kl": kl_divergence(posterior(p, over_index, hidden), normalized).clamp(min=0),
        }
        return {name: t.to(dtype) for name, t in result.items()}

    numbers = max(1, over_index.numel())  # behind one query
    rows = torch.arange(value.shape[2], device=value.device)
    blocks = [block(some) for some in rows.split(max(1, MOST_NUMBERS // numbers))]
    found = {name: torch.cat([part[name] for part in blocks], 2) for name in blocks[0]}
    return Inspection(value=value.to(dtype), lam=lam.to(dtype), gate=gate.to(dtype), **found, reader=None)
