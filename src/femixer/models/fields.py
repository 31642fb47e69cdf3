"""The fields of a configuration are of the types that they are declared with, whoever wrote config.json."""

from __future__ import annotations

import inspect
import math
import types
from typing import Any, Union, get_args, get_origin

from femixer.damage import shown

WORDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", types.NoneType: "null"}


def check_types(config: Any) -> None:
    """Raise a ValueError that names the first field of `config` whose value is not of its type.

    transformers checks types too, but not those of classes whose annotations are texts, as ours are.
    """
    for name, kind in declared(type(config)).items():
        value = getattr(config, name)
        if not fits(value, kind):
            raise ValueError(f"{name}={shown(value)} is not allowed; choose {described(kind)}")


def declared(kind: Any) -> dict[str, Any]:
    """Name -> type of the fields that a class itself declares."""
    return inspect.get_annotations(kind, eval_str=True)


def fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind)


def described(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(described, inner))
    if origin is list:
        return f"a list ({described(inner[0])} each)"
    return WORDS.get(kind, "an object")
