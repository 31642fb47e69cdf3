"""Reading files from elsewhere: any defect is a `Damaged`, one line that names the file. Results that are not finite
end a command, and are neither written nor shown.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import torch
from torch import Tensor, nn

from femixer.optional import MissingExtra

LONGEST = 400
"""Characters of another library's message that are shown."""


class Damaged(ValueError):
    """A file that cannot be read, or lacks what it must contain."""


@contextmanager
def reading(path: Any) -> Iterator[None]:
    """Turns the errors of a library that reads `path` into `Damaged`: every library has its own."""
    try:
        yield
    except (Damaged, MissingExtra, MemoryError, FloatingPointError):
        raise
    except Exception as error:
        told = in_one_line(error)
        told = told if str(path) in told else f"{path}: {told}"
        raise (OSError if isinstance(error, OSError) else Damaged)(told) from error


def in_one_line(error: BaseException) -> str:
    """The message of an error without line breaks; of one that only wraps another (as in transformers), the other's.

    A message that is only a value (KeyError) gets the kind of error in front.
    """
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        inner = in_one_line(error.__cause__)
        return inner if isinstance(error.__cause__, ValueError) else " ".join(str(error).split())[:LONGEST]
    told = " ".join(str(error).split())
    told = told if len(told) <= LONGEST else told[: LONGEST - 1] + "…"
    plain = isinstance(error, ValueError | OSError) and told
    return told if plain else f"{type(error).__name__}: {told}".removesuffix(": ")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: not text in UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. A duplicate name is an error: only one of its values would count."""
    return parsed(read_text(path), path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one per line."""
    lines = {f"{path}, line {number}": line for number, line in enumerate(read_text(path).splitlines(), start=1)}
    return [check_fields(parsed(line, where), {}, where) for where, line in lines.items()]


def parsed(text: str, where: Any) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for name, value in pairs:
            if name in content:
                raise Damaged(f"{where}: {name!r} is there twice")
            content[name] = value
        return content

    try:
        return json.loads(text, object_pairs_hook=once)
    except Damaged:
        raise
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: not JSON ({in_one_line(error)})") from None


KINDS: dict[Any, str] = {int: "a whole number", float: "a finite number", "number": "a number", bool: "true or false"}
KINDS |= {str: "a text", dict: "an object", list: "a list", type(None): "null"}

Fields = Mapping[str, Any]
"""Name -> what its value must be: a type, several as (int, None), [type] for a list, or the fields of an object.

float is a finite number, "number" also NaN. A name with a question mark at its end may be missing.
"""


def check_fields(content: Any, fields: Fields, where: Any) -> Any:
    """`content` as it is, after checking that it is an object with these fields; others may be there too."""
    _check(content, fields, where, "")
    return content


def _check(value: Any, kind: Any, where: Any, name: str) -> None:
    place = f"{where}: {name}={shown(value)}" if name else f"{where}: {shown(value)}"
    if isinstance(kind, Mapping):
        if not isinstance(value, dict):
            raise Damaged(f"{place} is not allowed; expected an object")
        for each, inner in kind.items():
            own, optional = each.removesuffix("?"), each.endswith("?")
            path = f"{name}.{own}" if name else own
            if own in value:
                _check(value[own], inner, where, path)
            elif not optional:
                raise Damaged(f"{where}: {path} is missing")
    elif isinstance(kind, list):
        if not isinstance(value, list):
            raise Damaged(f"{place} is not allowed; expected a list")
        for number, one in enumerate(value):
            _check(one, kind[0], where, f"{name}[{number}]")
    elif not fits(value, kind):
        raise Damaged(f"{place} is not allowed; expected {described(kind)}")


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Those of `int | None`, or of (int, None)."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else kind if isinstance(kind, tuple) else (kind,)


def described(kind: Any) -> str:
    """A kind in words: those of `Fields`, and types as they are annotated."""
    if len(kinds := alternatives(kind)) > 1:
        return " or ".join(map(described, kinds))
    if get_origin(kind) is Annotated:
        return described(get_args(kind)[0])
    if get_origin(kind) is list:
        return f"a list ({described(*get_args(kind))} each)"
    return KINDS.get(type(None) if kind is None else kind, "an object")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; None is that of None."""
    inner = get_args(kind)
    if len(kinds := alternatives(kind)) > 1:
        return any(fits(value, each) for each in kinds)
    if get_origin(kind) is Annotated:
        return fits(value, inner[0])
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(fits(each, *inner) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is None or kind is Any:
        return kind is Any or value is None
    if kind in ("number", float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or math.isfinite(value))
    if kind is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """A value in a message, not at length."""
    told = repr(value)
    return told if len(told) <= 80 else told[:79] + "…"


def check_numbers(values: Mapping[str, Any], what: str) -> None:
    """Raise a FloatingPointError that names a number (also one in a list or mapping) which is NaN or infinite."""
    for name, value in values.items():
        inner = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list) else None
        if inner is not None:
            check_numbers({f"{name}.{each}": one for each, one in inner.items()}, what)
        elif isinstance(value, float) and not math.isfinite(value):
            raise FloatingPointError(f"{what}: {name} is {value}, which is no result")


def check_tensor(values: Tensor, what: str) -> Tensor:
    """The tensor itself, or a FloatingPointError if one of its numbers is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        count = f"{bad:,} of {values.numel():,} numbers"
        raise FloatingPointError(f"{what}: {count} are NaN or infinite, which is no result")
    return values


def watch_logits(model: nn.Module, name: str) -> nn.Module:
    """Check the logits of every pass of `model`: the argmax of NaN is the first token, and looks like an answer."""

    def hook(_: nn.Module, inputs: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            check_tensor(logits, f"the logits of {name}")

    model.register_forward_hook(hook)
    return model
