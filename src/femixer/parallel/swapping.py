"""A module that goes on as a subclass of itself: same parameters, same name, other methods."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def swapped(module: nn.Module, methods: type) -> Any:
    """The module, from now on with these methods in front of its own. Modules keep their parameters and names."""
    kind: Any = type(module)
    module.__class__ = _joined(methods, kind)
    return module


@cache
def _joined(methods: Any, kind: Any) -> Any:
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
