"""`femixer vision <command> [options]`."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.subcommands import dispatch

COMMANDS = {
    "train": ("femixer.tasks.images.train", "a classifier from pictures, or from digits that need none"),
    "run": ("femixer.tasks.images.run", "models x seeds, as jobs of a results store"),
    "eval": ("femixer.tasks.images.evaluate", "a trained classifier on any pictures: accuracy and confusion"),
    "table": ("femixer.tasks.images.table", "results of run, beside the paper's"),
    "export": ("femixer.tasks.images.export", "a store of results as one small file"),
    "maps": ("femixer.tasks.images.maps", "which patches each channel of a trained classifier reads"),
}


def main(args: Sequence[str]) -> int | None:
    return dispatch("femixer vision", COMMANDS, args)
