"""Loss against the tokens trained on, one line per model, with a band where there are several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from femixer.optional import require
from femixer.training.results import Record

# Told apart with every kind of colour vision (Okabe and Ito), then again in dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")


def draw(models: Mapping[str, Sequence[Sequence[Record]]], batch_tokens: int) -> Any:
    """models: name -> the metrics of its runs, one run per seed. Of a single model also the training loss."""
    figures = require("matplotlib.figure", "plot")
    single = len(models) == 1
    drawing = figures.Figure(figsize=(7.5, 4.2) if single else (9.5, 5.2), dpi=120, layout="constrained")
    axes = drawing.subplots()
    for index, (name, runs) in enumerate(models.items()):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        if single:
            steps, losses = values(runs, "train")
            axes.plot(steps * batch_tokens, losses.mean(0), color="0.7", linewidth=1, label="training batches")
        steps, losses = values(runs, "validation")
        mean, spread = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else None
        tokens = steps * batch_tokens
        axes.plot(tokens, mean, color=colour, linestyle=dash, linewidth=1.8, label="validation" if single else name)
        if spread is not None:
            axes.fill_between(tokens, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", yscale="log")
    ticker = require("matplotlib.ticker", "plot")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=1 if single else 2)
    return drawing


def values(runs: Sequence[Sequence[Record]], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [n] and losses [runs, n] of one split; the untrained model is left out, it would stretch the axis."""
    kept = [[record for record in run if record.get("split") == split and record["step"] > 0] for run in runs]
    steps = np.array([record["step"] for record in kept[0]])
    return steps, np.array([[record["loss"] for record in run] for run in kept])
