"""Language modelling: corpora, tokenizers, shards of tokens, training, generation and evaluation."""

from femixer.tasks.runner import Task

RECORD = {"model": str, "seed": int, "text": str, "loss": float, "experiment": dict, "curve": [[float]]}
TASK = Task(
    "lm",
    format="lm 1",
    run="femixer.tasks.lm.task:LmRun",
    table="femixer.tasks.lm.runs:Curves",
    names=("compare", "curves"),
    run_help="train several mixers on the same text, with the same seeds and data order",
    table_help="learning curves of recorded comparisons, with bands over seeds",
    record=RECORD,
    read="femixer.tasks.lm.runs:load",
    others={
        "train": ("femixer.tasks.lm.task:train", "train a language model on text"),
        "reach": ("femixer.tasks.lm.runs:reach", "loss by position beyond the training length, and of what repeats"),
        "reproduce": ("femixer.tasks.lm.task:reproduce", "a row of the paper's table: train, evaluate, tabulate"),
        "presets": ("femixer.tasks.lm.model:presets", "sizes of models, and how many parameters each mixer gives them"),
        "data": ("femixer.tasks.lm.data:prepare_data", "tokenize a corpus into shards"),
        "tokenizer": ("femixer.tasks.lm.data:train_tokenizer", "train a BPE tokenizer on a corpus"),
        "table": ("femixer.tasks.lm.table", "evaluation results in the layout of the paper's table"),
    },
)
main = TASK.main
