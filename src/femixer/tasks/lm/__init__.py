"""Language modelling: corpora, tokenizers, shards of tokens, training, generation and evaluation."""

from collections.abc import Sequence

from femixer.options import Commands, dispatch

COMMANDS: Commands = {
    "train": ("femixer.tasks.lm.task:train", "train a language model on text"),
    "compare": (
        "femixer.tasks.lm.task:compare",
        "train several mixers on the same text, with the same seeds and data order",
    ),
    "export": ("femixer.tasks.lm.records:export", "finished runs of a comparison as one small file"),
    "curves": ("femixer.tasks.lm.records:curves", "learning curves of recorded comparisons, with bands over the seeds"),
    "reach": ("femixer.tasks.lm.reach", "loss by position beyond the training length, and of what the text repeats"),
    "reproduce": ("femixer.tasks.lm.task:reproduce", "a row of the paper's table: train, evaluate, tabulate"),
    "presets": ("femixer.tasks.lm.model:presets", "the sizes of models, and how many parameters each mixer gives them"),
    "data": ("femixer.tasks.lm.data:prepare_data", "tokenize a corpus into shards"),
    "tokenizer": ("femixer.tasks.lm.data:train_tokenizer", "train a BPE tokenizer on a corpus"),
    "table": ("femixer.tasks.lm.table", "evaluation results in the layout of the paper's table"),
}


def main(args: Sequence[str]) -> int | None:
    """`femixer lm <command> [options]`."""
    return dispatch("femixer lm", COMMANDS, args)
