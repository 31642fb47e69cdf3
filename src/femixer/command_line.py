"""The command that runs, as it was typed: what it writes says so."""

import contextvars
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
