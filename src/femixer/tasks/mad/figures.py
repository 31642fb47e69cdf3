"""The MAD scores as figures: a heat map of models by tasks, and what each part of FEM adds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from femixer.optional import require
from femixer.reporting import Score
from femixer.reporting.figures import figure
from femixer.tasks.mad.data import TASKS
from femixer.tasks.mad.table import FIGURES, GROUPS, WITHOUT_C, Row, average

LADDERS = {
    "Softmax attention": GROUPS["Softmax attention"],
    WITHOUT_C: ("SMAttn", *GROUPS[WITHOUT_C]),
    "GLA": GROUPS["GLA"],
    "Mamba": GROUPS["Mamba"],
    "AFT": GROUPS["AFT"],
}
"""From the bare mixer to all parts of FEM."""
COLUMNS = (*(task.title.replace(" ", "\n", 1) for task in TASKS.values()), "Avg")


def heat_map(table: Mapping[str, Row]) -> Any:
    """Mean accuracy in percent; a star where seeds are missing, a dash where all are."""
    order = dict.fromkeys(name for names in GROUPS.values() for name in names)
    models = [*(name for name in order if name in table), *(name for name in table if name not in order)]
    cells = [[*table[model].values(), average(table[model])] for model in models]
    values = np.array([percent([cell.mean for cell in row]) for row in cells])
    drawing = figure(8.5, 1.6 + 0.32 * len(models))
    axes = drawing.subplots()
    image = axes.imshow(np.ma.masked_invalid(values), cmap="Blues", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=9)
    axes.set_yticks(range(len(models)), models, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("0.93")
    for at, row in enumerate(cells):
        for column, cell in enumerate(row):
            dark = cell.mean is not None and cell.mean > 0.6
            axes.text(
                column, at, label(cell), ha="center", va="center", fontsize=8.5, color="white" if dark else "0.15"
            )
    axes.axvline(len(TASKS) - 0.5, color="white", linewidth=4)
    drawing.colorbar(image, ax=axes, label="test accuracy (%)", fraction=0.03, pad=0.02)
    if any(partial(cell) for row in cells for cell in row):
        axes.set_xlabel("* some seeds are missing", fontsize=8.5, loc="right")
    return drawing


def partial(cell: Score) -> bool:
    return cell.mean is not None and not cell.complete


def label(cell: Score) -> str:
    return "–" if cell.mean is None else f"{100 * cell.mean:.1f}" + "*" * partial(cell)


def ablation(table: Mapping[str, Row]) -> Any:
    """One panel per prior, from the bare mixer to FEM."""
    ladders = {title: [name for name in names if name in table] for title, names in LADDERS.items()}
    if {*ladders[WITHOUT_C]} <= {"SMAttn", "FEM-SM"}:
        del ladders[WITHOUT_C]  # both ends are those of the ladder with C
    ladders = {title: names for title, names in ladders.items() if len(names) > 1}
    count = max(1, len(ladders))
    drawing = figure(10, 2.9 * count)
    panels = drawing.subplots(count, 1, squeeze=False)[:, 0]
    for axes, (title, names) in zip(panels, ladders.items(), strict=False):
        axes.set_title(title, fontsize=10, loc="left")
        bars(axes, {name: [*table[name].values(), average(table[name])] for name in names})
    if not ladders:
        panels[0].text(0.5, 0.5, "The results have no two models of one family", ha="center", va="center")
        panels[0].set_axis_off()
    return drawing


def bars(axes: Any, ladder: Mapping[str, Sequence[Score]]) -> None:
    """Means with standard errors, hatched where seeds are missing; the paper's figures as diamonds."""
    shades = require("matplotlib", "plot").colormaps["viridis_r"](np.linspace(0.1, 0.9, len(ladder)))
    width = 0.8 / len(ladder)
    for at, ((name, cells), shade) in enumerate(zip(ladder.items(), shades, strict=True)):
        places = np.arange(len(COLUMNS)) + (at - (len(ladder) - 1) / 2) * width
        heights, errors = (percent([getattr(cell, what) for cell in cells]) for what in ("mean", "error"))
        look = {"color": shade, "edgecolor": "white", "linewidth": 0}
        drawn = axes.bar(places, heights, 0.92 * width, yerr=errors, label=name, error_kw={"linewidth": 1}, **look)
        for place, cell, bar in zip(places, cells, drawn, strict=True):
            if cell.mean is None:
                axes.text(place, 1, "–", ha="center", color="0.4")
            elif partial(cell):
                bar.set_hatch("////")
        paper = {"label": "paper"} if at == len(ladder) - 1 else {}
        axes.scatter(places, FIGURES[name], s=14, marker="D", facecolor="white", edgecolor="black", zorder=3, **paper)
    if any(partial(cell) for cells in ladder.values() for cell in cells):
        axes.set_xlabel("hatched: some seeds are missing", fontsize=8.5, loc="right")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=9)
    axes.set(ylim=(0, 105), ylabel="test accuracy (%)")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def percent(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else 100 * value for value in values])
