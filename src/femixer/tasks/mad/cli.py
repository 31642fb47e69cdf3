"""`femixer mad <command> [options]`."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.subcommands import dispatch

COMMANDS = {
    "run": ("femixer.tasks.mad.run", "train models on the tasks, here or on a cluster"),
    "table": ("femixer.tasks.mad.table", "results in the layout of the paper's table"),
    "export": ("femixer.tasks.mad.export", "a store of results as one small file"),
}


def main(args: Sequence[str]) -> int | None:
    return dispatch("femixer mad", COMMANDS, args)
