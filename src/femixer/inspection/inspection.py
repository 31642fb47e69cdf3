"""The tensors behind one call of a mixer, computed from the dense prior by the definitions in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from femixer.free_energy import free_energy, hidden_temperature, kl_divergence, posterior
from femixer.gates import outer_gate, temperature_gate

if TYPE_CHECKING:
    from femixer.mixer import FreeEnergyMixer


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
    kl: Tensor  #: [B, H, T, D], KL(posterior at hidden_beta || prior)

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


def inspect_mixer(
    mixer: FreeEnergyMixer, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
) -> Inspection:
    with torch.no_grad():
        (inputs, v, lam_logits, gate_logits, _), layout = mixer.prepare(x, mask, segments)
        # A prior that does not look at the tokens has one p for all sequences.
        p = mixer.prior.weights(inputs, layout)
        p = p.expand(x.shape[0], *p.shape[1:])

        def per_head(t: Tensor) -> Tensor:
            """[B, T, heads or kv_heads, D] -> [B, H, T, D] in float64"""
            return t.double().repeat_interleave(mixer.heads // t.shape[2], 2).transpose(1, 2)

        value, over_index = per_head(v), per_head(mixer.prior.over_index(v))
        beta = mixer.beta_max.double()[:, None]
        read_free = "L" in mixer.parts
        lam = torch.full_like(value, float(read_free)) if lam_logits is None else per_head(temperature_gate(lam_logits))
        gate = torch.ones_like(value) if gate_logits is None else per_head(outer_gate(gate_logits))
        mean, free = free_energy(p, over_index, 0.0), free_energy(p, over_index, beta)
        at_max = posterior(p, over_index, beta)
        hidden = hidden_temperature(p, over_index, beta, lam) if read_free else torch.zeros_like(value)
        weights = p if p.dim() == value.dim() + 1 else p[..., None]
        result = Inspection(
            prior=mixer.prior.over_tokens(p),
            posterior=mixer.prior.over_tokens(at_max),
            value=value,
            mean=mean,
            free_energy=free,
            posterior_mean=torch.einsum("bhtsd,bhsd->bhtd", at_max, over_index),
            lam=lam,
            gate=gate,
            read=torch.lerp(mean, free, lam),
            hidden_beta=hidden,
            kl=kl_divergence(posterior(p, over_index, hidden), weights),
        )
        return Inspection(**{f.name: getattr(result, f.name).to(x.dtype) for f in fields(result)})
