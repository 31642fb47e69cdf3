"""Figures: how a training went, and a forecast."""

from __future__ import annotations

from typing import Any

import numpy as np

from femixer.optional import require
from femixer.training.results import Record

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "0.45"
"""Of Okabe and Ito, told apart with every kind of colour vision."""
PANELS = 8
"""Channels that are drawn at most."""


def curve(record: Record, title: str) -> Any:
    """Validation MSE after each epoch, and the best."""
    drawing = require("matplotlib.figure", "plot").Figure(figsize=(6.5, 3.6), dpi=120, layout="constrained")
    axes = drawing.subplots()
    steps, errors = ([each[name] for each in record["evaluations"]] for name in ("step", "mse"))
    axes.plot(steps, errors, color=BLUE, marker="o", markersize=3, linewidth=1.5)
    axes.plot(record["best_step"], record["validation_mse"], "D", color=VERMILION, label="best", zorder=3)
    axes.set(xlabel="training steps", ylabel="validation MSE")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return drawing


def forecast_figure(history: Any, truth: Any, forecast: Any, title: str) -> Any:
    """One panel per channel, of the first PANELS: what was known, what came (where it is known) and what was forecast.

    history, truth, forecast: pandas.DataFrame over dates; truth may be empty.
    """
    columns = [*forecast.columns[:PANELS]]
    figures = require("matplotlib.figure", "plot")
    drawing = figures.Figure(figsize=(9.0, 1.2 + 1.7 * len(columns)), dpi=120, layout="constrained")
    panels = drawing.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    for axes, column in zip(panels, columns, strict=True):
        axes.plot(history.index, history[column], color=GREY, linewidth=1.2, label="history")
        if np.isfinite(truth[column].to_numpy(dtype=float)).any():
            # From the last point of the history, so that the curve does not break.
            joined = [history[column].iloc[-1:], truth[column]]
            whole = require("pandas", "series").concat(joined)
            axes.plot(whole.index, whole, color=BLUE, linewidth=1.2, label="truth")
        axes.plot(forecast.index, forecast[column], color=VERMILION, linewidth=1.6, label="forecast")
        axes.axvline(forecast.index[0], color="0.8", linewidth=0.8, zorder=0)
        axes.set_ylabel(column)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.93")
    drawing.align_ylabels()
    panels[0].legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    left = len(forecast.columns) - len(columns)
    drawing.suptitle(title + (f" (and {left} more channels)" if left else ""), fontsize=11)
    return drawing
