"""Compiled functions kept on disk, valid as long as the sources they may have inlined are unchanged.

numba keeps a compiled function as long as the function's own file is unchanged, but the machine code holds what it
calls from other files too. Here every function carries a stamp over the contents of all sources of compiled code.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

_PACKAGE = Path(__file__).parent.parent
# Compiled loops, and what they import constants from: both end up in machine code.
_SOURCES = (
    "**/numba_*.py",
    "kernels/marks.py",
    "kernels/streams/__init__.py",
    "baselines/kernels/selective_scan/plain.py",
)


def _stamp() -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in _PACKAGE.glob(pattern)}):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


STAMP = _stamp()
_announced = False


class _Cache(FunctionCache):
    """numba's cache of one function, with our stamp; a function that is not there is about to be compiled."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        if Path(function.__code__.co_filename).is_relative_to(_PACKAGE):
            self._cache_file._source_stamp = STAMP
        else:  # an operator of somebody else, whose own file counts as well
            self._cache_file._source_stamp = (self._cache_file._source_stamp, STAMP)

    def load_overload(self, signature: Any, context: Any) -> Any:
        found = super().load_overload(signature, context)
        if found is None:
            _announce()
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk must not stop a computation
            super().save_overload(signature, data)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with these options, and the result kept on disk where there is a place for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(nogil=True, **options)(function)
        with suppress(RuntimeError):  # no folder can be written: compile in every process
            dispatcher._cache = _Cache(function)
        return dispatcher

    return decorate


def _announce() -> None:
    """Once in a process, before the first function is compiled: until they are on disk this takes a while."""
    global _announced
    if not _announced:
        _announced = True
        print(
            "femixer: compiling kernels once, about half a minute; `femixer doctor --warm` does it ahead",
            file=sys.stderr,
            flush=True,
        )


def silence() -> None:
    """Say nothing about compiling: the caller does."""
    global _announced
    _announced = True
