"""Recipes: YAML files that give a command other defaults. Options on the command line still apply.

A recipe is a mapping from the names of options to values, on one level as on the command line:

    # comment
    preset: 340m
    lr: 4e-4
    data: [corpus/a.txt, corpus/b.txt]
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from femixer.damage import Damaged, in_one_line, read_text, shown
from femixer.optional import require

SHIPPED = Path(__file__).with_name("recipes")
_NAMED = {"true": "True", "false": "False", "null": "None"}
"""What YAML and the command line name otherwise."""

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
    """The entries of a recipe, values as they are written; `batch-tokens` and `batch_tokens` are the same name."""
    yaml = require("yaml", "cli")
    text = read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        content = yaml.load(text, Loader=yaml.BaseLoader)  # 4e-4, 1.10 and no are what they are on the command line
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


def _convert(path: Path, name: str, value: Any, kind: Any) -> Any:
    """A value of YAML as the command line would read it: `true`, `null`, one word, or a list or mapping of words."""
    constructors = require("tyro.constructors", "cli")
    spec = constructors.ConstructorRegistry.get_primitive_spec(constructors.PrimitiveTypeInfo.make(kind, set()))
    members = [*chain(*value.items())] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    allowed = spec.metavar if isinstance(spec.metavar, str) else " ".join(spec.metavar)
    refused = Damaged(f"{path}: {name}={shown(value)} is not allowed; choose {allowed}, as in --help")
    if not all(isinstance(member, str) and member for member in members) or spec.nargs not in ("*", len(members)):
        raise refused
    words = [_NAMED[word] if _NAMED.get(word, "-") in allowed else word for word in members]
    if spec.choices is not None and not {*words} <= {*spec.choices}:
        raise refused
    try:
        return spec.instance_from_str(words)
    except ValueError:
        raise refused from None
