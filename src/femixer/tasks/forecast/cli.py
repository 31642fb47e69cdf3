"""`femixer forecast <command> [options]`."""

from __future__ import annotations

from collections.abc import Sequence

from femixer.subcommands import dispatch

COMMANDS = {
    "train": ("femixer.tasks.forecast.train", "a forecaster from a file, or from a series that needs none"),
    "run": ("femixer.tasks.forecast.run", "models x data sets x horizons x seeds, as jobs of a results store"),
    "table": ("femixer.tasks.forecast.table", "results in the layout of the paper's table"),
    "export": ("femixer.tasks.forecast.export", "a store of results as one small file"),
    "predict": ("femixer.tasks.forecast.predict", "forecast with a trained model: a CSV and a figure"),
}


def main(args: Sequence[str]) -> int | None:
    return dispatch("femixer forecast", COMMANDS, args)
