"""The command line: commands by name, and the command that runs, as it was typed, which what it writes says.

A command is a line in a table and a function `main(args) -> int | None` in a module. The module is imported only when
its command is called, so `--help` stays fast and a missing extra concerns only who needs it.
"""

from __future__ import annotations

import contextvars
import importlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_given: contextvars.ContextVar[Sequence[str] | None] = contextvars.ContextVar("_given", default=None)
UNIMPORTANT = ("--resume", "--overwrite")
"""Options that change nothing about a result."""


@contextmanager
def given(args: Sequence[str]) -> Iterator[None]:
    token = _given.set([*args])
    try:
        yield
    finally:
        _given.reset(token)


def shown() -> str:
    """`femixer lm train ...`, nothing where no command runs (a call from Python)."""
    args = _given.get()
    return "" if args is None else shlex.join(["femixer", *(arg for arg in args if arg not in UNIMPORTANT)])


def has(option: str) -> bool:
    """Whether a command runs, with this option (`--data`)."""
    return any(arg.partition("=")[0] == option for arg in _given.get() or ())


def lacks(option: str) -> bool:
    """Whether a command runs, and without this option: its default is then nobody's choice."""
    return _given.get() is not None and not has(option)


Main = Callable[[Sequence[str]], int | None]
Commands = Mapping[str, tuple[str | Main, str]]
"""name -> (`module`, `module:function` or the function itself, one line of help)"""


def dispatch(command: str, table: Commands, args: Sequence[str]) -> int | None:
    """Run the command of `table` that `args` starts with; `command` is what the user typed before it."""
    name, *rest = [*args] or ["--help"]
    if name in ("-h", "--help"):
        print(usage(command, table))
        return 0
    if name not in table:
        raise ValueError(f"command={name!r} is unknown; choose one of {', '.join(table)}")
    return named(table[name][0], "main")(rest)


def named(place: Any, default: str = "") -> Any:
    """What `module:name` stands for, `default` where only a module is given; anything else is itself."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name or default)


def usage(command: str, table: Commands) -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in table.items()]
    hint = f"`{command} <command> --help` lists a command's options."
    return "\n".join([f"usage: {command} <command> [options]", "", *lines, "", hint])
