"""`femixer forecast table`: results of `femixer forecast run` in the layout of the paper's table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.evaluation.cells import Cell, Entry, escaped, latex_cell, markdown_cell, write_table
from femixer.options import parse
from femixer.tasks.forecast.known import LOOKBACKS
from femixer.tasks.forecast.paper import MEANS, PER_HORIZON
from femixer.tasks.forecast.selection import METRICS, TUNED, Group, groups, setting
from femixer.tasks.forecast.store import load
from femixer.training.results import Record

ORDER = (
    *("FEM-SM", "FEM-GLA", "FEM-Mamba", "FEM-AFT", "SMAttn", "GLA", "Mamba", "AFT"),
    *("iTransformer", "PatchTST", "DLinear", "NLinear", "SeasonalNaive", "LastValue"),
)
"""Columns from left to right; models that are not among them follow."""
NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "epochs": "number of epochs"}


@dataclass(frozen=True)
class Line:
    """A row of the table: what it is of, and an entry per model."""

    dataset: str
    lookback: str
    horizon: str
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Table:
    models: Sequence[str]
    metrics: Mapping[str, Sequence[Sequence[Line]]]
    """mse, mae -> groups of lines."""
    legend: Sequence[str]


def tabulate(records: Sequence[Record], tuned: Sequence[str] = TUNED) -> Table:
    found = groups(records, tuned)
    present = {record["model"]: None for record in records}
    models = [*(name for name in ORDER if name in present), *(name for name in present if name not in ORDER)]
    metrics = {metric: [[*lines(group, models, metric)] for group in found] for metric in METRICS}
    return Table(models, metrics, legend(records, metrics["mse"], tuned))


def lines(group: Group, models: Sequence[str], metric: str) -> Iterator[Line]:
    """One per horizon, their mean, and if that is over others than the paper's, a line of its figures alone."""
    look = "protocol" if group.lookback is None else str(group.lookback)
    for horizon in group.horizons:
        published = [PER_HORIZON.get((group.dataset, model), {}).get(horizon) for model in models]
        yield line(group, look, str(horizon), [group.cell(m, metric, horizon) for m in models], published, metric)
    paper = [MEANS.get((group.dataset, model)) for model in models]
    everything = group.horizons == tuple(LOOKBACKS)
    if len(group.horizons) > 1:
        title = "mean" if everything else f"mean of {', '.join(map(str, group.horizons))}"
        cells = [group.cell(model, metric, *group.horizons) for model in models]
        yield line(group, look, title, cells, paper if everything else [None] * len(models), metric)
    if not everything and any(paper) and metric == "mse":
        title = f"mean of {', '.join(map(str, LOOKBACKS))}"
        yield line(group, look, title, [Cell()] * len(models), paper, metric)


def line(
    group: Group, look: str, title: str, cells: Sequence[Cell], published: Sequence[float | None], metric: str
) -> Line:
    best = min((rounded(cell) for cell in cells if cell.complete and cell.scores), default=None)
    figures = published if metric == "mse" else [None] * len(cells)
    return Line(group.dataset, look, title, [entry(*each, best) for each in zip(cells, figures, strict=True)])


def rounded(cell: Cell) -> float:
    """To the digit that is shown, which is also what is compared."""
    assert cell.mean is not None
    return round(cell.mean, 3)


def entry(cell: Cell, published: float | None, best: float | None) -> Entry:
    printed = "" if published is None else f"{published:.3f}"
    if cell.mean is None:
        return Entry("", "", f"{cell.jobs} of {cell.expected} jobs" if cell.jobs else "", printed)
    error = "" if cell.error is None else f"{cell.error:.3f}"
    missing = "" if cell.complete else f"{len(cell.scores)} of {cell.seeds} seeds"
    return Entry(f"{cell.mean:.3f}", error, missing, printed, cell.complete and rounded(cell) == best)


def legend(records: Sequence[Record], shown: Sequence[Sequence[Line]], tuned: Sequence[str]) -> list[str]:
    """What a reader must know."""
    seeds = sorted({record["seed"] for record in records})
    over = f"mean ± standard error over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    entries = [each for group in shown for line in group for each in line.entries]
    text = [
        f"Test errors in units of the training rows' standard deviation, at the lowest validation MSE; {over}. The "
        "best of a row is bold. Look-backs of the protocol are "
        + ", ".join(f"{lookback} for {horizon}" for horizon, lookback in LOOKBACKS.items())
        + "."
    ]
    if any(each.paper for each in entries):
        text.append(
            "In parentheses: the paper's MSE where rows are means over all four horizons, and single horizons as the "
            "models' own papers give them (PatchTST at look-back 512, DLinear 336, iTransformer 96)."
        )
    if any(each.missing for each in entries):
        text.append("In brackets: what is finished, where that is not all. Such values are never bold.")
    settings = {(record["model"], setting(record, tuned)) for record in records}
    if len(settings) > len({model for model, _ in settings}):
        *names, last = (NAMES[name] for name in tuned)
        text.append(f"Where several were run, {', '.join(names)} and {last} are those of the lowest validation MSE.")
    diverged = sorted({record["model"] for record in records if record["diverged"]})
    if diverged:
        text.append(f"Training diverged, in some runs, of {', '.join(diverged)}; the best weights before that count.")
    if {"GLA", "Mamba", "AFT"} & {record["model"] for record in records}:
        text.append("GLA, Mamba and AFT are the normalized priors with the mean as read, not the published layers.")
    return text


def markdown(table: Table) -> str:
    texts = []
    for metric, shown in table.metrics.items():
        rows = [f"| {metric.upper()} | Look-back | Horizon | {' | '.join(table.models)} |"]
        rows.append("|---|---|---|" + "---:|" * len(table.models))
        for one in (one for group in shown for one in group):
            name = one.dataset.replace("|", "\\|")
            rows.append(f"| {' | '.join([name, one.lookback, one.horizon, *map(markdown_cell, one.entries)])} |")
        texts.append("\n".join(rows))
    return "\n\n".join([*texts, *table.legend]) + "\n"


def latex(table: Table) -> str:
    """A tabular of booktabs for each metric, with makecell."""
    text = [f"% {sentence}" for sentence in table.legend]
    for metric, shown in table.metrics.items():
        heads = [metric.upper(), "Look-back", "Horizon", *map(escaped, table.models)]
        text += [rf"\begin{{tabular}}{{lll *{{{len(table.models)}}}{{c}}}}", r"\toprule", rf"{' & '.join(heads)} \\"]
        for group in shown:
            text.append(r"\midrule")
            for one in group:
                first = [escaped(one.dataset), one.lookback, one.horizon]
                text.append(rf"{' & '.join([*first, *map(latex_cell, one.entries)])} \\")
        text += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(text)


def as_csv(table: Table) -> str:
    """One line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["metric", "dataset", "lookback", "horizon", "model", "value", "standard_error", "missing", "paper"]
    )
    for metric, shown in table.metrics.items():
        for one in (one for group in shown for one in group):
            for model, each in zip(table.models, one.entries, strict=True):
                place = [metric, one.dataset, one.lookback, one.horizon, model]
                writer.writerow([*place, each.value, each.error, each.missing, each.paper])
    return file.getvalue()


@dataclass(frozen=True)
class Command:
    """Put results of `femixer forecast run` into the layout of the paper's table.

    Writes table.md, which it prints, table.tex and table.csv: MSE and MAE of every data set and model, for each horizon
    and as the mean over them.
    """

    results: tuple[Path, ...]
    """Stores of `femixer forecast run`, or files of `femixer forecast export`."""
    choose_epochs: bool = False
    """Take results of different --epochs, which set how fast the rate rises and falls, as choices like the rate itself,
    of which the lowest validation MSE counts; otherwise they do not stand in one table."""
    out: Path = Path("results/forecast-table")
    """Folder of the files."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "forecast table")
    tuned = (*TUNED, "epochs") if command.choose_epochs else TUNED
    table = tabulate([record for path in command.results for record in load(path)], tuned)
    text = markdown(table)
    write_table(command.out, text, latex(table), as_csv(table))
    print(text)
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV")
    return 0
