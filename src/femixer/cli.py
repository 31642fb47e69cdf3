"""The command line: `femixer <command> [options]`.

A command is one line in `COMMANDS` and a module with a function `main(args) -> int | None`. The module is imported
only when its command is called, so `femixer --help` stays fast and a missing extra concerns only who needs it.
"""

import importlib
import shlex
import sys
from collections.abc import Sequence

from femixer.optional import MissingExtra
from femixer.training.interrupt import Interrupted

COMMANDS = {
    "argmax": ("femixer.tasks.argmax", "choose the largest value of each channel: FEM against softmax attention"),
    "bench": ("femixer.bench.cli", "speed and memory, as ratios measured in one run"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 2 wrong usage, 130 interrupted (and resumable)."""
    name, *rest = [*(sys.argv[1:] if args is None else args)] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        from femixer import __version__

        print(f"femixer {__version__}")
        return 0
    if name not in COMMANDS:
        return fail(f"command={name!r} is unknown; choose one of {', '.join(COMMANDS)}")
    return run(name, rest)


def run(name: str, args: list[str]) -> int:
    try:
        return importlib.import_module(COMMANDS[name][0]).main(args) or 0
    except (ValueError, FloatingPointError, MissingExtra, OSError) as error:
        if sys.flags.dev_mode:  # python -X dev -m femixer ...: show where it comes from
            raise
        return fail(str(error))
    except Interrupted as stop:
        again = [*(arg for arg in args if arg not in ("--overwrite", "--resume")), "--resume"]
        print(f"{stop}; continue with: {shlex.join(['femixer', name, *again])}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        return 130


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: femixer <command> [options]", "", *lines, "", "`femixer <command> --help` lists a command's options."]
    )
