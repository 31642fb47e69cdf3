"""Tasks: what models are trained on and compared by, each a folder with the same rooms.

    data     what there is to learn from
    model    what decides the numbers of a training, and the model built from it
    fit      training one model: losses, scores, the record that is kept
    task     the commands, and the jobs of an experiment
    table    which of the recorded numbers count, and the table in the paper's layout

A folder's `__init__.py` says what the task is (`runner.Task`); TASKS names it for the command line.
docs/add-a-task.md builds one.
"""

TASKS: dict[str, tuple[str, str]] = {
    "argmax": ("femixer.tasks.argmax", "choose the largest value of each channel: FEM against softmax attention"),
    "mad": ("femixer.tasks.mad", "six synthetic tasks, from a laptop to a cluster: run, tabulate"),
    "lm": ("femixer.tasks.lm", "language models: train, compare, prepare data, train a tokenizer, tabulate"),
    "forecast": ("femixer.tasks.forecast", "time series: train forecasters, compare them, tabulate, predict"),
    "vision": ("femixer.tasks.vision", "images: train classifiers, compare them, tabulate, show where they read"),
}
"""Command -> the module that has its `main`, and one line of help."""
