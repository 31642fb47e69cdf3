"""`femixer vision <command> [options]`."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.subcommands import dispatch

COMMANDS = {
    "train": ("femixer.tasks.vision.train", "a classifier from pictures, or from digits that need none"),
    "run": ("femixer.tasks.vision.run", "models x seeds, as jobs of a results store"),
    "eval": ("femixer.tasks.vision.evaluate", "a trained classifier on any pictures: accuracy and confusion"),
    "table": ("femixer.tasks.vision.table", "results of run, beside the paper's"),
    "export": ("femixer.tasks.vision.export", "a store of results as one small file"),
    "maps": ("femixer.tasks.vision.maps", "which patches each channel of a trained classifier reads"),
}


def main(args: Sequence[str]) -> int | None:
    return dispatch("femixer vision", COMMANDS, args)
