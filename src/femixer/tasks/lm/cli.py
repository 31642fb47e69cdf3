"""`femixer lm <command> [options]`."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.subcommands import dispatch

COMMANDS = {
    "train": ("femixer.tasks.lm.train", "train a language model on text"),
    "compare": (
        "femixer.tasks.lm.compare",
        "train several mixers on the same text, with the same seeds and data order",
    ),
    "presets": ("femixer.tasks.lm.presets", "the sizes of models, and how many parameters each mixer gives them"),
    "data": ("femixer.tasks.lm.prepare", "tokenize a corpus into shards"),
    "tokenizer": ("femixer.tasks.lm.vocabulary", "train a BPE tokenizer on a corpus"),
    "table": ("femixer.evaluation.table", "evaluation results in the layout of the paper's table"),
}


def main(args: Sequence[str]) -> int | None:
    return dispatch("femixer lm", COMMANDS, args)
