"""The mixers that are compared: attention, and FEM with a prior and parts, by the names of the command line."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from femixer.baselines import Attention
from femixer.bench.measure import MixerOptions
from femixer.mixer import FreeEnergyMixer
from femixer.options import check_different
from femixer.priors import parse_prior, prior_class
from femixer.priors.softmax import CACHES

ATTENTION = "attention"
# These two are options of the mixer and of models, which hand them to the prior.
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


def full_label(prior: str, parts: str | None) -> str:
    return ATTENTION if prior == ATTENTION else f"{label(prior)} {parts or '(mean)'}"


def check_priors(options: Any, *others: str) -> None:
    """Raise a ValueError unless the options' priors are such, each once; others: names that are allowed besides."""
    check_different(options, "priors")
    for prior in options.priors:
        if prior not in others:
            parse_prior(prior, "priors")


def arguments(prior: str, cache: str | None = None) -> dict[str, Any]:
    """What a layer or a model is told of its prior: prior, prior_options and those that are not the prior's own.

    cache: which of the softmax prior's two, None for the one in its name or its default.
    """
    name, given = parse_prior(prior)
    own = {option: given.pop(option) for option in _OF_THE_MIXER if option in given}
    if cache is not None:
        given["cache"] = cache
    return {"prior": name, "prior_options": given, **own}


def caches(prior: str, parts: str | None) -> tuple[str | None, ...]:
    """What decoding may keep: only the softmax prior has a choice, and only where there is an exponential to keep."""
    if prior == ATTENTION or "L" not in (parts or ""):
        return (None,)
    name, given = parse_prior(prior)
    if name != "softmax":
        return (None,)
    return (given["cache"],) if "cache" in given else CACHES


@dataclass(frozen=True)
class Mixer:
    """Attention, or FEM with these parts. prior: as on the command line, "attention" for the rival."""

    prior: str = ATTENTION
    parts: str | None = None

    @property
    def name(self) -> str:
        return full_label(self.prior, self.parts)

    def build(self, options: MixerOptions, causal: bool = True, cache: str | None = None) -> nn.Module:
        """The layer; cache: as in `arguments`."""
        shared: dict[str, Any] = {"causal": causal, "kv_heads": options.kv_heads, **options.tensors}
        if self.prior == ATTENTION:
            return Attention(options.dim, options.heads, **shared)
        return FreeEnergyMixer(
            options.dim, options.heads, parts=self.parts or "", **arguments(self.prior, cache), **shared
        )


@dataclass(frozen=True)
class Parameters:
    """All mixers share the budget of the matrices; the conditioner comes on top. prior: what the prior holds itself,
    besides the projections made for it."""

    total: int
    matrices: int
    biases: int
    temperatures: int
    prior: int
    conditioner: int
    conditioner_share: float

    @classmethod
    def of(cls, mixer: Mixer, options: MixerOptions, causal: bool = True) -> Parameters:
        layer = mixer.build(options, causal)
        # The same layer without a conditioner: its other widths do not depend on it.
        plain = layer
        if mixer.parts:
            plain = replace(mixer, parts=mixer.parts.replace("C", "")).build(options, causal)
        counts: Counter[str] = Counter()
        for name, parameter in plain.named_parameters():
            inside, kind = name.partition(".")[0], name.rpartition(".")[2]
            counts["prior" if inside == "prior" else kind if kind in ("weight", "bias") else ""] += parameter.numel()
        total = sum(parameter.numel() for parameter in layer.parameters())
        conditioner = total - counts.total()
        matrices, biases, temperatures, prior = (counts[name] for name in ("weight", "bias", "", "prior"))
        return cls(total, matrices, biases, temperatures, prior, conditioner, conditioner / total)
