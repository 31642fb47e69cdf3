"""The command line: commands by name, a dataclass as typed options, wrong values as errors that name them, recipes,
and the command that runs, as it was typed, which what it writes says.

A command is a line in a table and a function `main(args) -> int | None` in a module. The module is imported only when
its command is called, so `--help` stays fast and a missing extra concerns only who needs it.

A recipe is a YAML file that gives a command other defaults; options on the command line still apply. It is a mapping
from the names of options to values, on one level as on the command line:

    # comment
    preset: 340m
    lr: 4e-4
    data: [corpus/a.txt, corpus/b.txt]
"""

import contextvars
import dataclasses
import importlib
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from femixer.damage import Damaged, in_one_line, read_text, shown
from femixer.optional import require

Main = Callable[[Sequence[str]], int | None]
Commands = Mapping[str, tuple[str | Main, str]]
"""name -> (`module`, `module:function` or the function itself, one line of help)"""


def dispatch(command: str, table: Commands, args: Sequence[str]) -> int | None:
    """Run the command of `table` that `args` starts with; `command` is what the user typed before it."""
    name, *rest = [*args] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {name:<10}{text}" for name, (_, text) in table.items()]
        hint = f"`{command} <command> --help` lists a command's options."
        print("\n".join([f"usage: {command} <command> [options]", "", *lines, "", hint]))
        return 0
    check(name in table, "command", name, f"one of {', '.join(table)}", "is unknown")
    return named(table[name][0], "main")(rest)


def named(place: Any, default: str = "") -> Any:
    """What `module:name` stands for, `default` where only a module is given; anything else is itself."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name or default)


Options = TypeVar("Options")


def parse(options: type[Options], args: Sequence[str], command: str, default: Options | None = None) -> Options:
    """Read `args` into the dataclass `options`: one `--option` per field, helped by the docstring under the field.

    Fields of nested dataclasses are options on the same level; a bool is a plain flag (`--resume`). `default` gives
    other defaults than the dataclass does, which `--help` then shows. What the types say of values is checked here
    (`check_options`). Check the rest after parsing and not in `__post_init__`: there tyro would wrap the message in a
    box of its own.
    """
    tyro = require("tyro", "cli")
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    # tyro tells "no default" from "the default None" by whether the argument is given at all.
    given = {} if default is None else {"default": default}
    found = tyro.cli(options, args=list(args), prog=f"femixer {command}", config=markers, **given)
    check_options(found)
    return found


def positional() -> Any:
    """Marks an argument that has no name: `Annotated[Path, positional()]`."""
    return require("tyro", "cli").conf.Positional


MODEL = "--model"


def taken(args: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, None if it has none, and the other arguments."""
    value, rest, left = None, [], [*args]
    while left:
        name, equals, behind = left[0].partition("=")
        if name == option and (equals or len(left) > 1):
            given = behind if equals else left.pop(1)
            check(value is None, option.removeprefix("--"), f"{value} and {given}", "one")
            value = given
        else:
            rest.append(left[0])
        del left[0]
    return value, rest


def model_first(args: Sequence[str]) -> list[str]:
    """For commands whose model is the first argument: `--model PATH` anywhere is the same."""
    model, rest = taken(args, MODEL)
    if model is None:
        return rest
    first = rest[0] if rest else "-"
    check(first.startswith("-"), "model", model, f"it or the first argument, which is {first!r}, not both")
    return [model, *rest]


def model_named(args: Sequence[str]) -> list[str]:
    """For commands with the option --model: the first argument, if it is no option, is the same."""
    args = model_first(args)
    return args if not args or args[0].startswith("-") else [MODEL, *args]


def check(fits: bool, name: str, value: object, allowed: str, state: str = "is not allowed") -> None:
    """Raise a ValueError that names the argument, the value given and what is allowed, unless the value `fits`.

    state: what is wrong with it.
    """
    if not fits:
        raise ValueError(f"{name}={value!r} {state}; choose {allowed}")


class Rule(NamedTuple):
    """What a number may be, in words and as a test."""

    allowed: str
    fits: Callable[[Any], bool]


COUNT = Rule("a whole number above 0", lambda x: x > 0)
WHOLE = Rule("a whole number of at least 0", lambda x: x >= 0)
POSITIVE = Rule("a number above 0", lambda x: 0 < x < math.inf)
RATE = Rule("a number above 0 that float32 holds", lambda x: 0 < x < 1e38)
NOT_NEGATIVE = Rule("a number of at least 0", lambda x: 0 <= x < math.inf)
SHARE = Rule("a number from 0 to 1", lambda x: 0 <= x <= 1)
BELOW_ONE = Rule("a number from 0 to below 1", lambda x: 0 <= x < 1)


Count = Annotated[int, COUNT]
Whole = Annotated[int, WHOLE]
Positive = Annotated[float, POSITIVE]
Rate = Annotated[float, RATE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, SHARE]
BelowOne = Annotated[float, BELOW_ONE]


def check_options(options: Any) -> None:
    """Raise a ValueError that names the first field of a dataclass, or of one in it, whose value is not what its type
    says: one of a `Literal`, or what the rule of a `Count` allows; None is not given. No option means NaN, infinity or
    a number that no machine counts to."""
    hints = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        name, value = field.name, getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check_options(value)
            continue
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, float):
                check(math.isfinite(one), name, one, "a finite number")
            elif isinstance(one, int):
                check(abs(one) < 2**63, name, one, "a whole number of at most 19 digits")
            for rule in rules(hints[name]) if one is not None else ():
                check(rule.fits(one), name, one, rule.allowed)


def rules(kind: Any) -> Iterator[Rule]:
    """Those in a type, as in `tuple[Count, ...] | None`."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        names = [str(value) for value in inner]
        allowed = " or ".join(names) if len(names) == 2 else f"from {', '.join(names)}"
        yield Rule(allowed, lambda value: value in inner)
        return
    for each in inner:
        yield from [each] if isinstance(each, Rule) else rules(each)


def check_all(options: Any, rule: Rule, *names: str) -> None:
    """Raise a ValueError that names the first of these options which does not keep the rule; None is not given."""
    for name in names:
        value = getattr(options, name)
        check(value is None or rule.fits(value), name, value, rule.allowed)


def check_different(options: Any, name: str, known: Iterable[str] = ()) -> None:
    """Raise a ValueError unless the option has names, each once, all of them known."""
    names, known = getattr(options, name), [*known]
    allowed = "different ones" + (f" of {', '.join(known)}" if known else "")
    for one in names if known else ():
        check(one in known, name, one, allowed)
    check(0 < len(names) == len({*names}), name, names, allowed)


def check_positive(**values: float | None) -> None:
    """Raise a ValueError that names the first number which is not above zero; None is one that is not given."""
    for name, value in values.items():
        check(value is None or value > 0, name, value, COUNT.allowed)


MOST_THREADS = 1024
"""Beyond it OpenMP asks for memory that no machine has, and ends the process."""


def check_threads(threads: int | None) -> None:
    """Raise a ValueError unless a process can have as many; None is torch's choice."""
    check_positive(threads=threads)
    check((threads or 1) <= MOST_THREADS, "threads", threads, f"a whole number up to {MOST_THREADS}")


def expanded(names: Sequence[str], groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names, with the members of a group in the place of its name; what a group repeats is there once."""
    found: list[str] = []
    for name in names:
        found += [member for member in groups[name] if member not in found] if name in groups else [name]
    return tuple(found)


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


_running: contextvars.ContextVar[Sequence[str] | None] = contextvars.ContextVar("_running", default=None)
UNIMPORTANT = ("--resume", "--overwrite")
"""Options that change nothing about a result."""


@contextmanager
def running(args: Sequence[str] | None) -> Iterator[None]:
    """While the command with these arguments runs."""
    token = _running.set(None if args is None else [*args])
    try:
        yield
    finally:
        _running.reset(token)


def arguments() -> Sequence[str] | None:
    """Those of the command that runs, if one does."""
    return _running.get()


def as_typed() -> str:
    """`femixer lm train ...`, nothing where no command runs (a call from Python)."""
    args = _running.get()
    return "" if args is None else shlex.join(["femixer", *(arg for arg in args if arg not in UNIMPORTANT)])


def has_option(option: str) -> bool:
    """Whether a command runs, with this option (`--data`)."""
    return any(arg.partition("=")[0] == option for arg in _running.get() or ())


def lacks_option(option: str) -> bool:
    """Whether a command runs, and without this option: its default is then nobody's choice."""
    return _running.get() is not None and not has_option(option)


SHIPPED = Path(__file__).with_name("recipes")
_NAMED = {"true": "True", "false": "False", "null": "None"}
"""What YAML and the command line name otherwise."""


def recipes() -> list[str]:
    """The recipes that come with femixer."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def with_recipe(default: Options, args: Sequence[str]) -> tuple[Options, list[str]]:
    """Take `--recipe NAME_OR_PATH` out of `args`. Returns the defaults that it gives, for `options.parse`, and the
    other options."""
    recipe, rest = taken(args, "--recipe")
    recipe = "" if "--recipe" in rest else recipe
    return (default if recipe is None else apply_recipe(default, recipe)), rest


def apply_recipe(default: Options, recipe: str) -> Options:
    """`default`, a dataclass that may hold others, with the values of a shipped recipe or of a file."""
    places = [path for path in (Path(recipe), SHIPPED / f"{recipe}.yaml") if path.is_file()]
    check(len(places) > 0, "recipe", recipe, f"a YAML file, or one of {', '.join(recipes())}")
    path, known = places[0], _fields(default)
    values = read_recipe(path)
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: {name} is unknown; choose from {', '.join(sorted(known))}")
    return _replaced(default, {name: _convert(path, name, value, known[name]) for name, value in values.items()})


def read_recipe(path: Path) -> dict[str, Any]:
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
    lines: dict[str, int] = {}
    for key, _ in root.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:
            raise Damaged(f"{path}: {name} is there twice, in lines {lines[name]} and {line}")
        lines[name] = line
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
    held = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    inner = {name: _replaced(value, values) for name, value in held.items() if dataclasses.is_dataclass(value)}
    own = {name: values[name] for name in held if name in values and name not in inner}
    return dataclasses.replace(options, **inner, **own)


def takes_mapping(kind: Any) -> bool:
    """Whether a type is that of a mapping, or has one in it, as `dict[str, int] | None`."""
    return any(each in (dict, Mapping) for each in (kind, get_origin(kind))) or any(map(takes_mapping, get_args(kind)))


def _convert(path: Path, name: str, value: Any, kind: Any) -> Any:
    """A value of YAML as the command line would read it: `true`, `null`, one word, or a list or mapping of words."""
    constructors = require("tyro.constructors", "cli")
    spec = constructors.ConstructorRegistry.get_primitive_spec(constructors.PrimitiveTypeInfo.make(kind, set()))
    members = [*chain(*value.items())] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    allowed = spec.metavar if isinstance(spec.metavar, str) else " ".join(spec.metavar)
    refused = Damaged(f"{path}: {name}={shown(value)} is not allowed; choose {allowed}, as in --help")
    if not all(isinstance(member, str) and member for member in members) or spec.nargs not in ("*", len(members)):
        raise refused
    if isinstance(value, dict) and not takes_mapping(kind):
        raise refused
    words = [_NAMED[word] if _NAMED.get(word, "-") in allowed else word for word in members]
    if spec.choices is not None and not {*words} <= {*spec.choices}:
        raise refused
    try:
        return spec.instance_from_str(words)
    except ValueError:
        raise refused from None
