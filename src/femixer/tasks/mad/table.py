"""`femixer mad table`: results of `femixer mad run` in the layout of the paper's table, its figures beside ours."""

from __future__ import annotations

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from femixer.evaluation.cells import Cell, Entry, latex_cell, markdown_cell, stacked, write_table
from femixer.options import parse
from femixer.tasks.mad.comparable import setting
from femixer.tasks.mad.figures import ablation, heat_map
from femixer.tasks.mad.paper import FIGURES, GROUPS, MISPRINTS, WITHOUT_C
from femixer.tasks.mad.selection import Row, average, pair, rows
from femixer.tasks.mad.store import load
from femixer.tasks.mad.task import TASKS
from femixer.training import atomic
from femixer.training.results import Record

TITLES = (*(task.title for task in TASKS.values()), "Avg")
OTHERS = "Not in the paper's table"


@dataclass(frozen=True)
class Table:
    groups: Mapping[str, Mapping[str, Sequence[Entry]]]
    """title -> model -> the entries of TITLES."""
    legend: Sequence[str]
    sizes: Mapping[str, str]
    """Parameters of the models, as multiples of the plain transformer's."""


def tabulate(records: Sequence[Record], select: str, all_rows: bool = False) -> Table:
    table = rows(records, select)
    members = {**GROUPS, OTHERS: others(table, all_rows)}
    shown = {name: cells(table.get(name)) for names in members.values() for name in names if all_rows or name in table}
    best = [max(map(percent, column)) for column in zip(*shown.values(), strict=True)]
    lines = {name: [*map(entry, row, figures(name), best)] for name, row in shown.items()}
    groups = {title: {name: lines[name] for name in names if name in lines} for title, names in members.items()}
    if [*groups[WITHOUT_C]] == ["FEM-SM"]:
        del groups[WITHOUT_C]  # it repeats a row for comparison, and here is nothing to compare
    shown_groups = {title: group for title, group in groups.items() if group}
    return Table(shown_groups, legend(records, select, lines), sizes(records))


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
    other = "" if records[0]["protocol"] == "full" else ", of the full protocol: only orderings can be compared"
    text = [
        f"Test accuracy in percent, macro-averaged over tokens; protocol {records[0]['protocol']}; {over}. The best of "
        "a column is bold. Size: parameters of the whole model relative to SMAttn.",
        f"In parentheses: the paper's figures{other}.",
        f"Selected on the {select} split: of each job the evaluation of lowest loss{best}.",
    ]
    if any(each.missing for line in models.values() for each in line):
        text.append("In brackets: what is finished, where that is not all. Such values are never bold.")
    text += [sentence for name, sentence in MISPRINTS.items() if name in models]
    if {"GLA", "Mamba", "AFT"} & {*models}:
        text.append("GLA, Mamba and AFT are the normalized priors with the mean as read, not the published layers.")
    return text


def markdown(table: Table) -> str:
    lines = [f"| Model | {' | '.join(TITLES)} | Size |", "|---|" + "---:|" * (len(TITLES) + 1)]
    for title, group in table.groups.items():
        lines.append(f"| **{title}** |" + " |" * (len(TITLES) + 1))
        for name, line in group.items():
            lines.append(f"| {' | '.join([name, *map(markdown_cell, line), table.sizes.get(name, '')])} |")
    return "\n".join(lines) + "\n\n" + "\n\n".join(table.legend) + "\n"


def latex(table: Table) -> str:
    """A tabular of booktabs, with makecell."""
    heads = [stacked(title.split(" ", 1)) for title in TITLES]
    lines = [
        *(f"% {sentence}" for sentence in table.legend),
        rf"\begin{{tabular}}{{l *{{{len(TITLES) + 1}}}{{c}}}}",
        r"\toprule",
        rf"\textbf{{Model}} & {' & '.join(heads)} & \textbf{{Size}} \\",
    ]
    for group in table.groups.values():
        lines.append(r"\midrule")
        for name, line in group.items():
            lines.append(rf"{' & '.join([name, *map(latex_cell, line), table.sizes.get(name, '')])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def as_csv(table: Table) -> str:
    """One line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["group", "model", "task", "accuracy", "standard_error", "missing", "paper", "size"])
    for title, group in table.groups.items():
        for name, line in group.items():
            for task, each in zip((*TASKS, "average"), line, strict=True):
                numbers = (each.value, each.error, each.missing, each.paper, table.sizes.get(name, ""))
                writer.writerow([title, name, task, *numbers])
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
    records = [record for path in command.results for record in load(path)]
    table = tabulate(records, command.select, command.all_rows)
    scores = rows(records, command.select)
    text = markdown(table)
    write_table(command.out, text, latex(table), as_csv(table))
    for name, figure in (("heatmap.png", heat_map(scores)), ("ablation.png", ablation(scores))):
        with atomic.replacing(command.out / name) as partial:
            figure.savefig(partial, format="png")
    print(text)
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV, with two figures")
    return 0
