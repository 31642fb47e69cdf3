"""A prior and its options in one word, as on the command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from femixer.options import check
from femixer.priors import PRIORS, options_of

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
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text
