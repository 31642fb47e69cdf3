"""The look that figures share: sizes, colours that everybody can tell apart, quiet axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from femixer.optional import require
from femixer.reporting.writers import one_line
from femixer.training import atomic

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "0.45"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C564B", "#7F7F7F", "#B2A300")
"""Of Okabe and Ito first, told apart with every kind of colour vision; markers help in print."""
MARKERS = "osD^vP*Xh"
DASHES = ("-", "--", ":")
"""Of the first nine lines, the next nine, ..."""
DOTS_PER_INCH = 120


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    figures = require("matplotlib.figure", "plot")
    return figures.Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def looks(names: Sequence[str], rival: str | None = None) -> dict[str, dict[str, Any]]:
    """Colour, dash, marker and label of a line for each name; the rival is black and dashed."""
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(name for name in names if name != rival):
        again, n = divmod(number, len(COLOURS))
        dash = DASHES[again % len(DASHES)]
        found[name] = {"color": COLOURS[n], "linestyle": dash, "marker": MARKERS[n], "label": name}
    if rival is not None:
        found[rival] = {"color": "black", "linestyle": "--", "marker": "x", "label": rival}
    return found


def banded(axes: Any, x: Any, values: Any, look: Mapping[str, Any]) -> None:
    """The mean of values [runs, n] over x [n], with a band of one standard deviation where there are several runs."""
    mean = values.mean(0)
    axes.plot(x, mean, **look)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.15, linewidth=0)


def label(text: object, longest: int = 24) -> str:
    """A name that somebody else gave, on one line and short; draw it with parse_math=False: there a $ is a $."""
    line = one_line(str(text)) or " "
    return line if len(line) <= longest else line[: longest - 1] + "…"


def quiet(axes: Any) -> None:
    """A light grid, and no frame above and on the right."""
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_log(axis: Any, subs: Sequence[float] = (1, 2, 5)) -> None:
    """Ticks of a logarithmic axis at these multiples of powers of ten, as plain numbers."""
    ticker = require("matplotlib.ticker", "plot")
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axis.set_minor_locator(ticker.NullLocator())


def save(drawing: Any, path: Path) -> None:
    """As PNG, completely or not at all; what reaches over the edge is kept."""
    with atomic.replacing(path) as partial:
        drawing.savefig(partial, format="png", bbox_inches="tight")
