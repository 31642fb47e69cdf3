"""The mixers that are compared: attention, and FEM with a prior and parts, by the names of the command line."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from femixer.baselines import Attention
from femixer.bench.options import MixerOptions
from femixer.mixer import FreeEnergyMixer
from femixer.options import check
from femixer.priors import PRIORS, options_of, prior_class

ATTENTION = "attention"
_WORDS = {"true": True, "false": False, "none": None}
# These two are options of the mixer, which hands them to the prior.
_OF_THE_MIXER = ("rope", "window")


def parse_prior(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a prior, from "name" or "name:option=value,option=value"."""
    name, colon, rest = text.partition(":")
    check(name in PRIORS, "priors", text, f"one of {', '.join(PRIORS)}, alone or with options as in name:option=value")
    options = {}
    for item in rest.split(",") if colon else []:
        option, equals, value = item.partition("=")
        allowed = f"option=value after the colon; the options of {name} are: {', '.join(options_of(name)) or 'none'}"
        check(bool(equals and value) and option in options_of(name) and option not in options, "priors", text, allowed)
        options[option] = _value(value)
    return name, options


def _value(text: str) -> bool | int | float | str | None:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


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
