"""The mixers that are compared: attention, and FEM with a prior and parts, by the names of the command line."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from femixer.baselines import Attention
from femixer.bench.options import MixerOptions
from femixer.mixer import FreeEnergyMixer
from femixer.priors import prior_class
from femixer.priors.parsing import parse_prior

ATTENTION = "attention"
# These two are options of the mixer, which hands them to the prior.
_OF_THE_MIXER = ("rope", "window")


def canonical(prior: str) -> str:
    """The same prior without the options that are given their default, the others sorted."""
    name, options = parse_prior(prior)
    defaults = inspect.signature(prior_class(name).__init__).parameters
    changed = sorted(f"{option}={value}" for option, value in options.items() if value != defaults[option].default)
    return f"{name}:{','.join(changed)}" if changed else name


def label(prior: str) -> str:
    """What tables and figures call it: attention is not FEM with the prior softmax."""
    return ATTENTION if prior == ATTENTION else f"FEM {prior}"


@dataclass(frozen=True)
class Mixer:
    """Attention, or FEM with these parts. prior: as on the command line, "attention" for the rival."""

    prior: str = ATTENTION
    parts: str | None = None

    @property
    def name(self) -> str:
        parts = "" if self.prior == ATTENTION else f" {self.parts or '(mean)'}"
        return label(self.prior) + parts

    def build(self, options: MixerOptions, causal: bool = True, cache: str | None = None) -> nn.Module:
        """The layer. cache: which of the softmax prior's two, None for the one in its name or its default."""
        shared: dict[str, Any] = {"causal": causal, "kv_heads": options.kv_heads, **options.tensors}
        if self.prior == ATTENTION:
            return Attention(options.dim, options.heads, **shared)
        name, given = parse_prior(self.prior)
        shared |= {option: given.pop(option) for option in _OF_THE_MIXER if option in given}
        if cache is not None:
            given["cache"] = cache
        return FreeEnergyMixer(options.dim, options.heads, name, self.parts or "", prior_options=given, **shared)
