"""`femixer mad table`: results of `femixer mad run` in the layout of the paper's table, its figures beside ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from femixer.options import parse
from femixer.tasks.mad import store
from femixer.tasks.mad.figures import ablation, heat_map
from femixer.tasks.mad.paper import FIGURES, GROUPS, MISPRINTS, WITHOUT_C
from femixer.tasks.mad.selection import Cell, Row, average, pair, rows
from femixer.tasks.mad.store import Record
from femixer.tasks.mad.task import TASKS
from femixer.training import atomic

TITLES = (*(task.title for task in TASKS.values()), "Avg")
OTHERS = "Not in the paper's table"


@dataclass(frozen=True)
class Entry:
    """A number of the table as text, in percent; empty where there is none."""

    value: str
    error: str
    missing: str
    paper: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    groups: Mapping[str, Mapping[str, Sequence[Entry]]]
    """title -> model -> the entries of TITLES."""
    legend: Sequence[str]


def tabulate(records: Sequence[Record], select: str, all_rows: bool = False) -> Table:
    table = rows(records, select)
    members = {**GROUPS, OTHERS: others(table, all_rows)}
    shown = {name: cells(table.get(name)) for names in members.values() for name in names if all_rows or name in table}
    best = [max(map(percent, column)) for column in zip(*shown.values(), strict=True)]
    lines = {name: [*map(entry, row, figures(name), best)] for name, row in shown.items()}
    groups = {title: {name: lines[name] for name in names if name in lines} for title, names in members.items()}
    if [*groups[WITHOUT_C]] == ["FEM-SM"]:
        del groups[WITHOUT_C]  # it repeats a row for comparison, and here is nothing to compare
    return Table({title: group for title, group in groups.items() if group}, legend(records, select, lines))


def others(table: Mapping[str, Row], all_rows: bool) -> list[str]:
    """Models that the paper does not have, in the order of femixer.models.named where all are shown."""
    names = [*table]
    if all_rows:
        from femixer.models.named import NAMED  # with transformers, seconds that the table needs only here

        names = [*dict.fromkeys([*NAMED, *names])]
    return [name for name in names if name not in FIGURES]


def cells(row: Row | None) -> list[Cell]:
    return [Cell()] * len(TITLES) if row is None else [*row.values(), average(row)]


def figures(name: str) -> Sequence[float | None]:
    return FIGURES.get(name, (None,) * len(TITLES))


def percent(cell: Cell) -> float:
    """To the digit that is shown, which is also what is compared; below all others where something is missing."""
    return round(100 * cell.mean, 1) if cell.mean is not None and cell.complete else -1.0


def entry(cell: Cell, paper: float | None, best: float) -> Entry:
    printed = "" if paper is None else str(paper)
    if cell.mean is None:
        return Entry("", "", f"{cell.jobs} of {cell.expected} jobs" if cell.jobs else "", printed)
    error = "" if cell.error is None else f"{100 * cell.error:.1f}"
    missing = "" if cell.complete else f"{len(cell.scores)} of {cell.seeds} seeds"
    return Entry(f"{100 * cell.mean:.1f}", error, missing, printed, cell.complete and percent(cell) == best)


def legend(records: Sequence[Record], select: str, models: Mapping[str, Sequence[Entry]]) -> list[str]:
    """What a reader must know."""
    seeds = sorted({record["seed"] for record in records})
    pairs = {(record["task"], pair(record)) for record in records}
    most = max(sum(task == name for task, _ in pairs) for name in TASKS)
    over = f"mean ± standard error over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    best = f", and of each setting the best of {most} learning rates and weight decays" if most > 1 else ""
    text = [
        f"Test accuracy in percent, macro-averaged over tokens; protocol {records[0]['protocol']}; {over}. The best of "
        "a column is bold. In parentheses: the paper's figures.",
        f"Selected on the {select} split: of each job the evaluation of lowest loss{best}.",
    ]
    if any(each.missing for line in models.values() for each in line):
        text.append("In brackets: what is finished, where that is not all. Such values are never bold.")
    text += [sentence for name, sentence in MISPRINTS.items() if name in models]
    if {"GLA", "Mamba", "AFT"} & {*models}:
        text.append("GLA, Mamba and AFT are the normalized priors with the mean as read, not the published layers.")
    return text


def markdown(table: Table) -> str:
    lines = [f"| Model | {' | '.join(TITLES)} |", "|---|" + "---:|" * len(TITLES)]
    for title, group in table.groups.items():
        lines.append(f"| **{title}** |" + " |" * len(TITLES))
        lines += [f"| {' | '.join([name, *map(markdown_cell, line)])} |" for name, line in group.items()]
    return "\n".join(lines) + "\n\n" + "\n\n".join(table.legend) + "\n"


def markdown_cell(entry: Entry) -> str:
    value = f"**{entry.value}**" if entry.best else entry.value
    ours = [value, entry.error and f"± {entry.error}", entry.missing and f"[{entry.missing}]"]
    return " ".join(filter(None, [" ".join(filter(None, ours)) or "–", entry.paper and f"({entry.paper})"]))


def latex(table: Table) -> str:
    """A tabular of booktabs, with makecell."""
    heads = [stacked(title.split(" ", 1)) for title in TITLES]
    lines = [
        *(f"% {sentence}" for sentence in table.legend),
        rf"\begin{{tabular}}{{l *{{{len(TITLES)}}}{{c}}}}",
        r"\toprule",
        rf"\textbf{{Model}} & {' & '.join(heads)} \\",
    ]
    for group in table.groups.values():
        lines.append(r"\midrule")
        lines += [rf"{' & '.join([name, *map(latex_cell, line)])} \\" for name, line in group.items()]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex_cell(entry: Entry) -> str:
    value = rf"\textbf{{{entry.value}}}" if entry.best else entry.value
    first = value + (rf"{{\scriptsize$\pm${entry.error}}}" if entry.error else "")
    small = [entry.missing and f"[{entry.missing}]", entry.paper and f"({entry.paper})"]
    return stacked([first or ("" if entry.missing else "--"), *(text and rf"\scriptsize {text}" for text in small)])


def stacked(lines: Sequence[str]) -> str:
    return r"\makecell{" + r"\\".join(filter(None, lines)) + "}"


def as_csv(table: Table) -> str:
    """One line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["group", "model", "task", "accuracy", "standard_error", "missing", "paper"])
    for title, group in table.groups.items():
        for name, line in group.items():
            for task, each in zip((*TASKS, "average"), line, strict=True):
                writer.writerow([title, name, task, each.value, each.error, each.missing, each.paper])
    return file.getvalue()


@dataclass(frozen=True)
class Command:
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


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "mad table")
    records = [record for path in command.results for record in store.load(path)]
    table = tabulate(records, command.select, command.all_rows)
    scores = rows(records, command.select)
    command.out.mkdir(parents=True, exist_ok=True)
    text = markdown(table)
    for name, content in (("table.md", text), ("table.tex", latex(table)), ("table.csv", as_csv(table))):
        atomic.write(command.out / name, content)
    for name, figure in (("heatmap.png", heat_map(scores)), ("ablation.png", ablation(scores))):
        with atomic.replacing(command.out / name) as partial:
            figure.savefig(partial, format="png")
    print(text)
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV, with two figures")
    return 0
