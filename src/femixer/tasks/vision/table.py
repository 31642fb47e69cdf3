"""`femixer vision table`: results of `femixer vision run`, beside the paper's where there are any."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.evaluation.cells import Cell, Entry, escaped, latex_cell, markdown_cell, write_table
from femixer.options import parse
from femixer.tasks.vision.paper import TOP1, published
from femixer.tasks.vision.selection import Group, groups, pair
from femixer.tasks.vision.store import load
from femixer.training.results import Record

ORDER = ("SMAttn", "FEM-SM", "GLA", "FEM-GLA")
"""Rows from top to bottom; models that are not among them follow."""
METRICS = {"top1": "Top-1 (%)", "top5": "Top-5 (%)", "loss": "Loss"}


@dataclass(frozen=True)
class Line:
    """A row of the table: a model and its entries, one per metric."""

    model: str
    parameters: int
    entries: Sequence[Entry]
    seconds: float


@dataclass(frozen=True)
class Section:
    """Lines that may be compared."""

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Table:
    sections: Sequence[Section]
    legend: Sequence[str]


def tabulate(records: Sequence[Record]) -> Table:
    found = groups(records)
    sections = [Section(f"{group.dataset}, {group.preset}", [*lines(group)]) for group in found]
    return Table(sections, legend(records, sections))


def lines(group: Group) -> Iterator[Line]:
    models = [*(m for m in ORDER if m in group.chosen), *(m for m in group.chosen if m not in ORDER)]
    cells = {metric: [group.cell(model, metric) for model in models] for metric in METRICS}
    best = {metric: bests(metric, own) for metric, own in cells.items()}
    for number, model in enumerate(models):
        paper = published(group.dataset, group.classes, group.preset, model)
        entries = [
            entry(cells[metric][number], metric, paper if metric == "top1" else None, best[metric])
            for metric in METRICS
        ]
        own = group.chosen[model]
        yield Line(model, own[0]["parameter_count"], entries, statistics.mean(record["seconds"] for record in own))


def shown(value: float, metric: str) -> str:
    return f"{value:.4f}" if metric == "loss" else f"{100 * value:.2f}"


def bests(metric: str, cells: Sequence[Cell]) -> str | None:
    """The best mean as it is shown, which is also what is compared."""
    means = [cell.mean for cell in cells if cell.complete and cell.mean is not None]
    choose = min if metric == "loss" else max
    return shown(choose(means), metric) if means else None


def entry(cell: Cell, metric: str, paper: float | None, best: str | None) -> Entry:
    assert cell.mean is not None
    error = "" if cell.error is None else shown(cell.error, metric)
    missing = "" if cell.complete else f"{len(cell.scores)} of {cell.seeds} seeds"
    value = shown(cell.mean, metric)
    return Entry(value, error, missing, "" if paper is None else f"{paper:.2f}", cell.complete and value == best)


def legend(records: Sequence[Record], sections: Sequence[Section]) -> list[str]:
    """What a reader must know."""
    seeds = sorted({record["seed"] for record in records})
    over = f"mean ± standard error over seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    text = [f"On the test part, once, at the best validation accuracy; {over}. The best of a column is bold."]
    entries = [each for section in sections for line in section.lines for each in line.entries]
    if any(each.paper for each in entries):
        text.append(f"In parentheses: the paper's top-1 accuracy for {' and '.join(TOP1)}.")
    if any(each.missing for each in entries):
        text.append("In brackets: what is finished, where that is not all. Such values are never bold.")
    for section in sections:
        text += spread(section)
    pairs = {(record["model"], record["dataset"], record["preset"], pair(record)) for record in records}
    if len(pairs) > len({each[:3] for each in pairs}):
        text.append("Learning rates and weight decays are those of the highest validation accuracy.")
    diverged = sorted({record["model"] for record in records if record["diverged"]})
    if diverged:
        text.append(f"Training diverged, in some runs, of {', '.join(diverged)}; the best weights before that count.")
    broken = max(record["broken"] for record in records)
    if broken:
        text.append(f"Up to {broken} pictures could not be read and were skipped.")
    if "GLA" in {record["model"] for record in records}:
        text.append("GLA is the normalized prior with the mean as read, not the published layer.")
    return text


def spread(section: Section) -> list[str]:
    counts = [line.parameters for line in section.lines]
    share = max(counts) / min(counts) - 1
    return [f"Parameters of {section.title} differ by {share:.1%} at most."] if len(counts) > 1 else []


def markdown(table: Table) -> str:
    texts = []
    for section in table.sections:
        rows = [f"| {section.title} | Parameters | {' | '.join(METRICS.values())} | Seconds |", "|---|" + "---:|" * 5]
        for line in section.lines:
            cells = [line.model, f"{line.parameters:,}", *map(markdown_cell, line.entries), f"{line.seconds:,.0f}"]
            rows.append(f"| {' | '.join(cells)} |")
        texts.append("\n".join(rows))
    return "\n\n".join([*texts, *table.legend]) + "\n"


def latex(table: Table) -> str:
    """A tabular of booktabs for each section, with makecell."""
    text = [f"% {sentence}" for sentence in table.legend]
    for section in table.sections:
        heads = [section.title, "Parameters", *METRICS.values()]
        text += [r"\begin{tabular}{lrccc}", r"\toprule", rf"{' & '.join(map(escaped, heads))} \\", r"\midrule"]
        for line in section.lines:
            cells = [escaped(line.model), f"{line.parameters:,}", *map(latex_cell, line.entries)]
            text.append(rf"{' & '.join(cells)} \\")
        text += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(text)


def as_csv(table: Table) -> str:
    """One line per number."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["data", "model", "parameters", "metric", "value", "standard_error", "missing", "paper"])
    for section in table.sections:
        for line in section.lines:
            for metric, each in zip(METRICS, line.entries, strict=True):
                place = [section.title, line.model, line.parameters, metric]
                writer.writerow([*place, each.value, each.error, each.missing, each.paper])
    return file.getvalue()


@dataclass(frozen=True)
class Command:
    """Put results of `femixer vision run` into a table.

    Writes table.md, which it prints, table.tex and table.csv: test accuracy, loss and parameters of every model, beside
    the paper's figures where the pictures are ImageNet's.
    """

    results: tuple[Path, ...]
    """Stores of `femixer vision run`, or files of `femixer vision export`."""
    out: Path = Path("results/vision-table")
    """Folder of the files."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "vision table")
    table = tabulate([record for path in command.results for record in load(path)])
    text = markdown(table)
    write_table(command.out, text, latex(table), as_csv(table))
    print(text)
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV")
    return 0
