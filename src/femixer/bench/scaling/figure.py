"""The figure of `femixer bench scaling`: time per token, memory and speed of decoding, one line per mixer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from femixer.bench.mixers import ATTENTION, label
from femixer.bench.scaling.report import Report
from femixer.bench.scaling.tables import PASSES, tokens_per_second
from femixer.optional import require

# Okabe and Ito's colours, told apart with every kind of colour vision; the markers help in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C564B", "#7F7F7F", "#B2A300")
MARKERS = "osD^vP*Xh"
_LOOK = {"linewidth": 1.6, "markersize": 5, "zorder": 3}


def draw(report: Report) -> Any:
    """One row of panels for the forward pass, and a second one where training was measured."""
    steps = [step for step in PASSES if any(p.step == step for p in report.sequences)]
    figures = require("matplotlib.figure", "plot")
    drawing = figures.Figure(figsize=(15.0, 0.4 + 3.8 * len(steps)), dpi=120, layout="constrained")
    panels = drawing.subplots(len(steps), 3, squeeze=False)
    looks = _looks(report.mixers)
    for row, step in zip(panels, steps, strict=True):
        time, memory, _ = row
        for mixer in report.mixers:
            points = report.sequence(mixer, step)
            if points:
                seconds = [p.seconds.median * 1e6 for p in points.values()]
                time.plot(list(points), seconds, **looks[mixer], **_LOOK)
                memory.plot(list(points), [p.peak_bytes / 1e6 for p in points.values()], **looks[mixer], **_LOOK)
        _label(time, f"Time, {PASSES[step]}", "µs per token", "tokens of the sequence", 2)
        _label(memory, f"Peak memory, {PASSES[step]}", "MB", "tokens of the sequence", 2)
    decode, speed = panels[0][2], tokens_per_second(report)
    for mixer in report.mixers:
        found = report.decoding(mixer)
        if found:
            decode.plot(list(found), [speed(p) for p in found.values()], **looks[mixer], **_LOOK)
    _label(decode, "Decoding", "tokens per second", "tokens seen before", 10)
    for row in panels[1:]:
        row[2].set_visible(False)
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels[0]), key=lambda found: len(found[1]))
    drawing.legend(handles, labels, loc="outside right center", frameon=False)
    s = report.settings
    sequences = "one sequence" if s["batch"] == 1 else f"{s['batch']} sequences"
    drawing.suptitle(
        f"One layer, {sequences}: dim {s['dim']}, {s['heads']} heads, {s['dtype']}, "
        f"{report.environment['threads']} threads"
    )
    return drawing


def _looks(mixers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Attention is black and dashed; the others take their colours in turn, with another marker each time."""
    fem = [mixer for mixer in mixers if mixer != ATTENTION]
    looks: dict[str, dict[str, Any]] = {
        mixer: {"color": COLORS[n % len(COLORS)], "marker": MARKERS[n % len(MARKERS)], "label": label(mixer)}
        for n, mixer in enumerate(fem)
    }
    return {**looks, ATTENTION: {"color": "black", "linestyle": "--", "marker": "x", "label": label(ATTENTION)}}


def _label(axes: Any, title: str, ylabel: str, xlabel: str, base: int) -> None:
    ticker = require("matplotlib.ticker", "plot")
    axes.set_xscale("log", base=base)
    axes.set(yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left")
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(_short))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    low, high = axes.get_ylim()
    if high < 4 * low:  # noise of a flat line shall not fill the panel
        middle = (low * high) ** 0.5
        low, high = middle / 2, middle * 2
        axes.set_ylim(low, high)
    subs = (1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 4, 5, 7)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: float, _: object = None) -> str:
    """512, 64k (of 1024 where it is a power of two), 100k, 1M."""
    for size, letter in ((2**20, "M"), (1000**2, "M"), (2**10, "k"), (1000, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
