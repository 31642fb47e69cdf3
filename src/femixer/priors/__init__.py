"""Priors by name. A new prior is one file here and one line in the registry."""

from __future__ import annotations

import inspect
from typing import Any

from femixer.priors.aft import AFTPrior
from femixer.priors.base import Prior, Widths
from femixer.priors.decay import DecayPrior
from femixer.priors.fox import FoxPrior
from femixer.priors.gla import GLAPrior
from femixer.priors.interactive import InteractivePrior
from femixer.priors.linear import LinearPrior
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
    """Names of the keyword options that a prior takes beyond what every prior takes."""

    def keywords(cls: type[Prior]) -> set[str]:
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    return sorted(keywords(prior_class(name)) - keywords(Prior))


def build_prior(
    name: str, heads: int, kv_heads: int, widths: Widths, causal: bool, options: dict[str, Any], made: dict[str, Any]
) -> Prior:
    """options: the prior's own; made: device and dtype of its parameters."""
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"{option}={options[option]!r} does not fit prior={name!r}; its options are {known}")
    return prior_class(name)(heads, kv_heads, widths, causal=causal, **made, **options)


__all__ = ["PRIORS", "Alibi", "Prior", "SoftmaxPrior", "Widths", "build_prior", "options_of", "prior_class"]
