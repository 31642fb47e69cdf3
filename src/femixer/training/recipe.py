"""Recipes: YAML files that give a command other defaults. Options on the command line still apply.

A recipe is a mapping from the names of options to values, on one level as on the command line:

    # comment
    preset: 340m
    lr: 4e-4
    data: [corpus/a.txt, corpus/b.txt]
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from femixer.damage import Damaged, in_one_line, read_text, shown
from femixer.optional import require

SHIPPED = Path(__file__).with_name("recipes")

Options = TypeVar("Options")


def names() -> list[str]:
    """The recipes that come with femixer."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def with_recipe(default: Options, args: Sequence[str]) -> tuple[Options, list[str]]:
    """Take `--recipe NAME_OR_PATH` out of `args`. Returns the defaults that it gives, for `options.parse`, and the
    other options."""
    rest, recipe = [], None
    arguments = iter(args)
    for arg in arguments:
        if arg == "--recipe":
            recipe = next(arguments, "")
        elif arg.startswith("--recipe="):
            recipe = arg.removeprefix("--recipe=")
        else:
            rest.append(arg)
    return (default if recipe is None else apply(default, recipe)), rest


def apply(default: Options, recipe: str) -> Options:
    """`default`, a dataclass that may hold others, with the values of a shipped recipe or of a file."""
    path = find(recipe)
    values = read(path)
    known = _fields(default)
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: {name} is unknown; choose from {', '.join(sorted(known))}")
    return _replaced(default, {name: _convert(path, name, value, known[name]) for name, value in values.items()})


def find(recipe: str) -> Path:
    for path in (Path(recipe), SHIPPED / f"{recipe}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"recipe={recipe!r} is not allowed; choose a YAML file, or one of {', '.join(names())}")


def read(path: Path) -> dict[str, Any]:
    """The entries of a recipe; `batch-tokens` and `batch_tokens` are the same name."""
    yaml = require("yaml", "cli")
    text = read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise Damaged(f"{path}: not YAML ({getattr(error, 'problem', None) or in_one_line(error)}{place})") from error
    if not isinstance(content, dict):
        raise Damaged(f"{path}: expected `option: value` on each line, not {shown(content)}")
    names = [(str(key.value).replace("-", "_"), key.start_mark.line + 1) for key, _ in root.value]
    for number, (name, line) in enumerate(names):
        first = next((at for other, at in names[:number] if other == name), None)
        if first is not None:
            raise Damaged(f"{path}: {name} is there twice, in lines {first} and {line}")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _fields(options: Any) -> dict[str, Any]:
    """Name -> type of all fields, those of nested dataclasses on the same level."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        found |= _fields(value) if dataclasses.is_dataclass(value) else {field.name: hints[field.name]}
    return found


def _replaced(options: Any, values: Mapping[str, Any]) -> Any:
    changes = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _replaced(value, values)
        elif field.name in values:
            changes[field.name] = values[field.name]
    return dataclasses.replace(options, **changes)


class Unfit(Exception):
    """A value is not of the type; the message says what is."""


def _convert(path: Path, name: str, value: Any, kind: Any) -> Any:
    try:
        return convert(value, kind)
    except Unfit as expected:
        raise Damaged(f"{path}: {name}={shown(value)} is not allowed; choose {expected}") from None


def convert(value: Any, kind: Any) -> Any:
    """The YAML value as a value of a type: numbers, texts, paths, choices, lists, mappings, and unions of those."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        if value in arguments and type(value) in {type(argument) for argument in arguments}:
            return value
        raise Unfit("one of " + ", ".join(map(str, arguments)))
    if origin in (Union, types.UnionType):
        return _first(value, arguments)
    if origin in (list, tuple, Sequence):
        if not isinstance(value, list):
            raise Unfit("a list")
        return (tuple if origin is tuple else list)(_members(value, origin, arguments))
    if origin in (dict, Mapping) or kind is dict:
        if not isinstance(value, dict):
            raise Unfit("a mapping")
        key, content = arguments or (Any, Any)
        return {convert(k, key): convert(v, content) for k, v in value.items()}
    return _scalar(value, kind)


def _first(value: Any, kinds: Sequence[Any]) -> Any:
    """The value as the first of the types that takes it as it is, or else as the first that can be made of it."""
    expected, made = [], []
    for kind in kinds:
        try:
            made.append(convert(value, kind))
        except Unfit as problem:
            expected.append(str(problem))
    if not made:
        raise Unfit(" or ".join(expected))
    return next((one for one in made if type(one) is type(value)), made[0])


def _members(values: list[Any], origin: Any, kinds: tuple[Any, ...]) -> list[Any]:
    if origin is tuple and kinds[-1] is not ...:
        if len(values) != len(kinds):
            raise Unfit(f"a list of {len(kinds)}")
        return [convert(value, kind) for value, kind in zip(values, kinds, strict=True)]
    return [convert(value, kinds[0]) for value in values]


def _scalar(value: Any, kind: Any) -> Any:
    if kind is type(None) and value is None:
        return None
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 4e-4 for a text: it wants 4.0e-4
        except ValueError:
            pass
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    called = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
    raise Unfit("null" if kind is type(None) else called.get(kind, str(kind)))
