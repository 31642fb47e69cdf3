"""Commands by name: one line in a table and a module with a function `main(args) -> int | None` for each.

The module is imported only when its command is called, so `--help` stays fast and a missing extra concerns only who
needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

Table = Mapping[str, tuple[str, str]]
"""name -> (module, one line of help)"""


def dispatch(command: str, table: Table, args: Sequence[str]) -> int | None:
    """Run the command of `table` that `args` starts with; `command` is what the user typed before it."""
    name, *rest = [*args] or ["--help"]
    if name in ("-h", "--help"):
        print(usage(command, table))
        return 0
    if name not in table:
        raise ValueError(f"command={name!r} is unknown; choose one of {', '.join(table)}")
    return importlib.import_module(table[name][0]).main(rest)


def usage(command: str, table: Table) -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in table.items()]
    hint = f"`{command} <command> --help` lists a command's options."
    return "\n".join([f"usage: {command} <command> [options]", "", *lines, "", hint])
