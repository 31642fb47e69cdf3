"""Priors by name. A new prior is one file here and one line in the registry."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from femixer.options import check
from femixer.priors.aft import AFTPrior
from femixer.priors.base import Prior, Widths
from femixer.priors.decay import DecayPrior
from femixer.priors.fox import FoxPrior
from femixer.priors.interactive import InteractivePrior
from femixer.priors.linear import GLAPrior, LinearPrior
from femixer.priors.mamba import MambaPrior
from femixer.priors.softmax import Alibi, SoftmaxPrior
from femixer.priors.ssm import SSMPrior

PRIORS: dict[str, type[Prior]] = {
    "softmax": SoftmaxPrior,
    "fox": FoxPrior,
    "linear": LinearPrior,
    "gla": GLAPrior,
    "aft": AFTPrior,
    "decay": DecayPrior,
    "ssm": SSMPrior,
    "mamba": MambaPrior,
    "mamba-interactive": InteractivePrior,
}


def prior_class(name: str) -> type[Prior]:
    if not isinstance(name, str) or name not in PRIORS:
        raise ValueError(f"prior={name!r} is unknown; choose one of {', '.join(PRIORS)}")
    return PRIORS[name]


def options_of(name: str) -> list[str]:
    """Names of a prior's own options: the keyword-only parameters that not every prior has."""

    def keywords(cls: type[Prior]) -> set[str]:
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    return sorted(keywords(prior_class(name)) - keywords(Prior))


def build_prior(
    name: str,
    heads: int,
    kv_heads: int,
    widths: Widths,
    causal: bool,
    options: dict[str, Any],
    factory_kwargs: dict[str, Any],
) -> Prior:
    """Build a prior by name. options: its own options; factory_kwargs: device and dtype of its parameters."""
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"{option}={options[option]!r} does not fit prior={name!r}; its options are {known}")
    return prior_class(name)(heads, kv_heads, widths, causal=causal, **factory_kwargs, **options)


_WORDS = {"true": True, "false": False, "none": None}


def parse_prior(text: str, argument: str = "prior") -> tuple[str, dict[str, Any]]:
    """Name and options of a prior, from "name" or "name:option=value,option=value", given as `argument`."""
    name, colon, rest = text.partition(":")
    check(name in PRIORS, argument, text, f"one of {', '.join(PRIORS)}, alone or with options as in name:option=value")
    options = {}
    for item in rest.split(",") if colon else []:
        option, equals, value = item.partition("=")
        allowed = f"option=value after the colon; the options of {name} are: {', '.join(options_of(name)) or 'none'}"
        check(bool(equals and value) and option in options_of(name) and option not in options, argument, text, allowed)
        options[option] = value_of(value)
    return name, options


def value_of(text: str) -> bool | int | float | str | None:
    """Parse an option's value: true, false, none, a number, or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


__all__ = [
    "PRIORS",
    "Alibi",
    "Prior",
    "SoftmaxPrior",
    "Widths",
    "build_prior",
    "options_of",
    "parse_prior",
    "prior_class",
    "value_of",
]
