"""`femixer mad table`: results of `femixer mad run` as the paper's table, its numbers beside ours, and as figures.

A job's accuracy is the test accuracy at the evaluation of lowest loss on the selecting split. Among jobs that differ
only in learning rate and weight decay, the one of highest accuracy on the selecting split counts. A task's score is the
mean over its settings, and a model's the mean over the six tasks. The original selects on its test split; validation is
a split of our own.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from femixer.optional import require
from femixer.options import check
from femixer.reporting import Cell, Column, Group, Score, Table, marked_columns, mean_of
from femixer.reporting.figures import figure, quiet
from femixer.tasks.mad.data import TASKS
from femixer.tasks.mad.protocol import PROTOCOLS
from femixer.tasks.runner import Tabulate, note_of_priors, over_seeds, usual_notes
from femixer.training.results import Record
from femixer.training.store import as_text, distinct, same

WITHOUT_C = "Softmax attention without C"
"""The group that repeats FEM-SM for comparison, as in the paper."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Baselines": ("Hyena", "DeltaNet", "LinAttn", "Mamba2", "GatedDeltaNet", "DiffTrans"),
    "Softmax attention": ("SMAttn", "SMAttn+C", "SMAttn+C,L", "SMAttn+C,L,T", "FEM-SM"),
    WITHOUT_C: ("SMAttn+L", "SMAttn+L,T", "SMAttn+L,T,G", "FEM-SM"),
    "GLA": ("GLA", "GLA+C", "GLA+C,L", "GLA+C,L,T", "FEM-GLA"),
    "Mamba": ("Mamba", "FEM-Mamba(-norm)", "FEM-Mamba"),
    "AFT": ("AFT", "FEM-AFT"),
}
"""Rows from top to bottom, by the names of `femixer.models.named`. The paper writes FEM-SM (-G,T) for SMAttn+C,L, and
so on."""

FIGURES: dict[str, tuple[float, ...]] = {
    "Hyena": (44.8, 14.4, 99.0, 89.4, 98.6, 93.0, 73.2),
    "DeltaNet": (42.2, 35.7, 99.9, 52.8, 99.9, 99.9, 71.7),
    "LinAttn": (33.1, 8.2, 91.0, 74.9, 75.6, 93.1, 62.6),
    "Mamba2": (43.6, 21.1, 96.4, 86.9, 96.7, 93.3, 73.0),
    "GatedDeltaNet": (45.0, 29.8, 99.9, 80.2, 99.9, 94.3, 74.9),
    "DiffTrans": (42.9, 39.0, 99.9, 83.7, 97.1, 95.8, 76.4),
    "SMAttn": (44.3, 24.5, 99.9, 85.7, 98.5, 95.1, 74.7),
    "SMAttn+C": (45.0, 31.4, 99.9, 85.5, 99.9, 96.3, 76.3),
    "SMAttn+C,L": (50.3, 39.0, 99.9, 85.4, 99.9, 98.0, 78.8),
    "SMAttn+C,L,T": (52.3, 39.1, 99.9, 85.8, 99.9, 99.4, 79.4),
    "FEM-SM": (53.1, 43.1, 99.9, 85.9, 99.9, 99.3, 80.2),
    "SMAttn+L": (49.5, 26.3, 99.9, 85.7, 97.5, 97.5, 76.1),
    "SMAttn+L,T": (50.7, 32.8, 99.9, 85.7, 98.0, 97.6, 77.5),
    "SMAttn+L,T,G": (51.2, 35.4, 99.9, 85.9, 98.5, 99.0, 78.3),
    "GLA": (40.2, 8.5, 91.3, 81.3, 86.8, 76.8, 64.2),
    "GLA+C": (47.1, 9.4, 91.7, 83.4, 92.5, 88.5, 68.8),
    "GLA+C,L": (51.2, 12.4, 92.2, 85.1, 92.4, 89.2, 70.4),
    "GLA+C,L,T": (51.9, 13.2, 97.1, 86.1, 93.5, 91.4, 72.2),
    "FEM-GLA": (53.0, 19.1, 99.9, 86.3, 99.9, 99.0, 74.9),
    "Mamba": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3),
    "FEM-Mamba(-norm)": (50.5, 12.8, 93.4, 88.9, 86.3, 92.2, 70.7),
    "FEM-Mamba": (51.1, 16.8, 90.7, 89.7, 92.7, 97.0, 73.0),
    "AFT": (50.5, 9.15, 63.0, 31.1, 69.2, 90.1, 52.2),
    "FEM-AFT": (55.5, 9.78, 90.3, 80.1, 90.2, 93.4, 69.9),
}
"""Accuracy in percent, in the order of TASKS, then the average as printed."""

MISPRINTS = {"FEM-GLA": "The paper prints an average of 74.9 for FEM-GLA; its six columns average 76.2."}
"""What to know of a row of the paper."""


def comparable(records: Sequence[Record]) -> list[Record]:
    """The records, each job once; an error if they are not of one experiment."""

    def training(record: Record) -> str:
        """Besides the learning rate and weight decay."""
        others = {name: value for name, value in record.get("training", {}).items() if name != "fields"}
        return as_text({"steps": record["steps"], **others})

    for record in records:
        check(record["task"] in TASKS, "task", record["task"], f"one of {', '.join(TASKS)}, in every record")
        check(len(record["evaluations"]) > 0, "evaluations", record["evaluations"], "at least one, in every record")
    same(records, "protocols", lambda record: record["protocol"])
    protocol = PROTOCOLS.get(records[0]["protocol"].partition(" ")[0])
    if protocol is None or not protocol.sweeps:
        same(records, "settings of a task", setting, "task")
    same(records, "ways of training a task", training, "task", "parameters")
    made = "model", "task", "parameters"
    same(records, "models of one name", lambda record: as_text(record.get("training", {}).get("fields")), *made)
    definition = ("model", "task", "parameters", "lr", "weight_decay", "seed")
    return distinct(records, lambda record: as_text(record["evaluations"]), definition)


def setting(record: Record) -> str:
    """All parameters of the task."""
    return as_text(record["parameters"])


SELECT = ("validation", "test")

Row = dict[str, Score]
"""Task -> score of one model, all six of them: accuracies from 0 to 1."""


def rows(records: Sequence[Record], select: str = "validation") -> dict[str, Row]:
    """The scores of each model, in the order in which the models first appear."""
    check(select in SELECT, "select", select, f"one of {', '.join(SELECT)}")
    records = comparable(records)
    seeds = {record["seed"] for record in records}
    table: dict[str, Row] = {model: {} for model in dict.fromkeys(record["model"] for record in records)}
    for task in TASKS:
        of_task = [record for record in records if record["task"] == task]
        settings = {setting(record) for record in of_task} | planned(records[0]["protocol"], task)
        pairs = {pair(record) for record in of_task}
        for model, row in table.items():
            own = [record for record in of_task if record["model"] == model]
            row[task] = score(own, seeds, settings, pairs, select)
    return table


def score(
    records: Iterable[Record], seeds: Collection[int], settings: Collection[str], pairs: Collection[object], select: str
) -> Score:
    """One model on one task; `settings` and `pairs` of learning rate and weight decay are what must be there."""
    found: dict[int, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        found[record["seed"]][setting(record)].append(record)
    finished = {seed: sum(map(len, jobs.values())) for seed, jobs in found.items()}
    each = len(settings) * len(pairs)
    scores = {
        seed: statistics.mean(accuracy(jobs, select) for jobs in found[seed].values())
        for seed in sorted(found)
        if finished[seed] == each
    }
    return Score(scores, len(seeds), sum(finished.values()), each * len(seeds))


def with_average(row: Row) -> list[Score]:
    """Of the six tasks, and their average, of the seeds that all of them have."""
    return [*row.values(), mean_of([*row.values()])]


def accuracy(jobs: Iterable[Record], select: str) -> float:
    """On the test split, of the best of jobs that differ only in learning rate and weight decay."""
    chosen = [min(job["evaluations"], key=lambda at: loss(at, select)) for job in jobs]
    best = max(chosen, key=lambda at: (at[select]["accuracy"], -loss(at, select)))
    return best["test"]["accuracy"]


def loss(evaluation: Record, select: str) -> float:
    """Infinite where training had diverged: NaN is neither less nor more than any number."""
    value = evaluation[select]["loss"]
    return value if value is not None and math.isfinite(value) else math.inf


def pair(record: Record) -> tuple[float, float]:
    return record["lr"], record["weight_decay"]


def planned(protocol: str, task: str) -> set[str]:
    """The settings of a protocol that has many. One with a single setting per task has it in the results, if any."""
    known = PROTOCOLS.get(protocol)
    parameters = known.settings(task) if known is not None and known.sweeps else []
    return {as_text(each) for each in parameters}


TITLES = {name: task.title.replace(" ", "\n", 1) for name, task in TASKS.items()}
COLUMNS = (
    Column("Model"),
    *(Column(title, key=name, scores=True) for name, title in TITLES.items()),
    Column("Avg", key="average", scores=True),
    Column("Size", align="right"),
)
OTHERS = "Not in the paper's table"


def tabulate(records: Sequence[Record], select: str, all_rows: bool = False) -> Table:
    scores, size = rows(records, select), sizes(records)
    members = {**GROUPS, OTHERS: others(scores, all_rows)}
    shown = [*dict.fromkeys(name for names in members.values() for name in names if all_rows or name in scores)]
    lines = dict(zip(shown, marked_columns([cells(name, scores.get(name)) for name in shown]), strict=True))
    own = {title: [name for name in names if name in lines] for title, names in members.items()}
    if own[WITHOUT_C] == ["FEM-SM"]:
        del own[WITHOUT_C]  # it repeats a row for comparison, and here is nothing to compare
    groups = [
        Group([[name, *lines[name], size.get(name, "")] for name in names], title)
        for title, names in own.items()
        if names
    ]
    return Table(COLUMNS, groups, notes=legend(records, select, lines), stacked=True, melted=("task", "accuracy"))


def cells(name: str, row: Row | None) -> list[Cell]:
    """Accuracies in percent, the six and their average, the paper's beside them."""
    figures = FIGURES.get(name)
    papers = [""] * (len(TASKS) + 1) if figures is None else map(str, figures)
    found = [Score()] * (len(TASKS) + 1) if row is None else with_average(row)
    return [each.cell(1, 100, paper) for each, paper in zip(found, papers, strict=True)]


def sizes(records: Sequence[Record]) -> dict[str, str]:
    """Of each model, on average over the settings that it shares with plain attention, if that is there."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for record in records:
        counts[record["model"]][record["task"] + setting(record)] = record["parameter_count"]
    plain = counts.get("SMAttn", {})
    shared = {name: [own[key] / plain[key] for key in own if key in plain] for name, own in counts.items()}
    return {name: f"{statistics.mean(ratios):.2f}" for name, ratios in shared.items() if ratios}


def others(table: Mapping[str, Row], all_rows: bool) -> list[str]:
    """Models that the paper does not have, in the order of femixer.models.named where all are shown."""
    names = [*table]
    if all_rows:
        from femixer.models.named import NAMED  # with transformers, seconds that the table needs only here

        names = [*dict.fromkeys([*NAMED, *names])]
    return [name for name in names if name not in FIGURES]


def legend(records: Sequence[Record], select: str, models: Mapping[str, Sequence[Cell]]) -> list[str]:
    """What a reader must know."""
    pairs = {(record["task"], pair(record)) for record in records}
    most = max(sum(task == name for task, _ in pairs) for name in TASKS)
    best = f", and of each setting the best of {most} learning rates and weight decays" if most > 1 else ""
    protocol = records[0]["protocol"]
    other = "" if protocol == "full" else ", of the full protocol: only orderings can be compared"
    text = [
        f"Test accuracy in percent, macro-averaged over tokens; protocol {protocol}; {over_seeds(records)}. "
        "The best of a column is bold. Size: parameters of the whole model relative to SMAttn.",
        f"In parentheses: the paper's figures{other}.",
        f"Selected on the {select} split: of each job the evaluation of lowest loss{best}.",
    ]
    text += usual_notes(records, models.values())
    text += [sentence for name, sentence in MISPRINTS.items() if name in models]
    return text + note_of_priors(models)


@dataclass(frozen=True)
class MadTabulate(Tabulate):
    """Put results of `femixer mad run` into the layout of the paper's table.

    Writes table.md, which it prints, table.tex and table.csv, and two figures: heatmap.png, models by tasks, and
    ablation.png, what each part of FEM adds.
    """

    results: tuple[Path, ...]
    """Stores of `femixer mad run`, or files of `femixer mad export`."""
    out: Path = Path("results/mad-table")
    """Folder of the files."""
    select: Literal["validation", "test"] = "validation"
    """Split that selects evaluations, learning rates and weight decays; test is the original's rule."""
    all_rows: bool = False
    """Show models without results too."""

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return [tabulate(records, self.select, self.all_rows)]

    def figures(self, records: Sequence[Record]) -> dict[str, Any]:
        scores = rows(records, self.select)
        return {"heatmap.png": heat_map(scores), "ablation.png": ablation(scores)}


LADDERS = {title: names for title, names in GROUPS.items() if title != "Baselines"}
LADDERS[WITHOUT_C] = ("SMAttn", *GROUPS[WITHOUT_C])
"""From the bare mixer to all parts of FEM."""
TICKS = (*TITLES.values(), "Avg")


def heat_map(table: Mapping[str, Row]) -> Any:
    """Mean accuracy in percent; a star where seeds are missing, a dash where all are."""
    order = dict.fromkeys(name for names in GROUPS.values() for name in names)
    models = [*(name for name in order if name in table), *(name for name in table if name not in order)]
    cells = [with_average(table[model]) for model in models]
    values = np.array([percent([cell.mean for cell in row]) for row in cells])
    drawing = figure(8.5, 1.6 + 0.32 * len(models))
    axes = drawing.subplots()
    image = axes.imshow(np.ma.masked_invalid(values), cmap="Blues", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(TICKS)), TICKS, fontsize=9)
    axes.set_yticks(range(len(models)), models, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("0.93")
    for at, row in enumerate(cells):
        for column, cell in enumerate(row):
            colour = "white" if cell.mean is not None and cell.mean > 0.6 else "0.15"
            axes.text(column, at, label(cell), ha="center", va="center", fontsize=8.5, color=colour)
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
        bars(axes, {name: with_average(table[name]) for name in names})
    if not ladders:
        panels[0].text(0.5, 0.5, "The results have no two models of one family", ha="center", va="center")
        panels[0].set_axis_off()
    return drawing


def bars(axes: Any, ladder: Mapping[str, Sequence[Score]]) -> None:
    """Means with standard errors, hatched where seeds are missing; the paper's figures as diamonds."""
    shades = require("matplotlib", "plot").colormaps["viridis_r"](np.linspace(0.1, 0.9, len(ladder)))
    width = 0.8 / len(ladder)
    for at, ((name, cells), shade) in enumerate(zip(ladder.items(), shades, strict=True)):
        places = np.arange(len(TICKS)) + (at - (len(ladder) - 1) / 2) * width
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
    axes.set_xticks(range(len(TICKS)), TICKS, fontsize=9)
    axes.set(ylim=(0, 105), ylabel="test accuracy (%)")
    quiet(axes)
    axes.grid(visible=False, axis="x")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def percent(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else 100 * value for value in values])
