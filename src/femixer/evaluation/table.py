"""`femixer lm table`: results of `femixer eval` in the layout of the paper's table of language models.

Rows are models, in groups of about the same size; columns are the tasks of the paper, then the average rank within the
group and the number of firsts. The best value of a group is bold and the second underlined. What the table shows, three
digits, is also what is ranked.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from femixer.evaluation.cells import escaped
from femixer.evaluation.ranking import Value, best_two, rank
from femixer.evaluation.report import RESULTS
from femixer.evaluation.suite import BLOCKS, COLUMNS, Column
from femixer.optional import require
from femixer.options import check, parse
from femixer.training import atomic

tyro = require("tyro", "cli")

SAME_SIZE = 0.9
"""Models of one group have at least this share of the parameters of its largest."""


@dataclass(frozen=True)
class Row:
    """A model and its values, one per column of the paper."""

    name: str
    group: str | None  # as given; None: by size
    parameters: int
    values: tuple[Value, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    title: str
    rows: tuple[Row, ...]

    def table(self) -> list[list[Value]]:
        """For each row its values, its average rank and its firsts."""
        rankings = rank([row.values for row in self.rows])
        return [
            [*row.values, None if place.average is None else half_up(place.average), float(place.firsts)]
            for row, place in zip(self.rows, rankings, strict=True)
        ]


def half_up(average: float) -> float:
    """Two digits, 7.625 as 7.63: `round` would go to the even one, and the paper does not."""
    return math.floor(average * 100 + 0.5) / 100


def read(argument: str) -> Row:
    """A row from `FOLDER`, `NAME=FOLDER` or `GROUP/NAME=FOLDER`."""
    label, _, path = ("", "", argument) if Path(argument).is_dir() else argument.rpartition("=")
    file = Path(path) / RESULTS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        tasks, settings, parameters = (content[name] for name in ("tasks", "settings", "parameters"))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"results={argument!r} is no results folder of `femixer eval`: there is no readable {file}"
        ) from None
    group, _, name = label.rpartition("/")
    name = name or settings["model"]
    notes = [] if settings["limit"] is None else [f"{name}: only a part of each task (--limit {settings['limit']:g})"]
    values = [_value(tasks, column, name, notes) for column in COLUMNS]
    return Row(name, group or None, parameters, tuple(values), tuple(notes))


def _value(tasks: dict[str, Any], column: Column, name: str, notes: list[str]) -> Value:
    """The value of a column, to the digits that are shown. Other shots than the paper's would be another column."""
    task = tasks.get(column.task)
    if task is None or column.metric not in task["metrics"]:
        return None
    if task["shots"] != column.shots:
        notes.append(f"{name}: {column.title} left out, evaluated with {task['shots']} shots instead of {column.shots}")
        return None
    return round(task["metrics"][column.metric]["value"], 3)


def grouped(rows: Sequence[Row]) -> list[Group]:
    """Rows by the group given, or else by size; the largest models first, each group in the order given."""
    members: dict[str, list[Row]] = {}
    sized: list[list[Row]] = []
    for row in sorted((row for row in rows if row.group is None), key=lambda row: -row.parameters):
        if not sized or row.parameters < SAME_SIZE * sized[-1][0].parameters:
            sized.append([])
        sized[-1].append(row)
    for same in sized:
        title = f"{size(sum(row.parameters for row in same) / len(same))} parameters"
        members.setdefault(title, []).extend(row for row in rows if row in same)
    for row in rows:
        if row.group is not None:
            members.setdefault(row.group, []).append(row)
    largest = {title: max(row.parameters for row in same) for title, same in members.items()}
    return [Group(title, tuple(members[title])) for title in sorted(members, key=lambda title: -largest[title])]


def size(parameters: float) -> str:
    """Two digits and a letter: 1.3B, 340M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.995 * unit:
            value = parameters / unit
            return f"{value:.1f}{letter}" if value < 9.95 else f"{float(f'{value:.2g}'):.0f}{letter}"
    return f"{parameters:.0f}"


FORMATS = (*["{:.3f}"] * len(COLUMNS), "{:.2f}", "{:.0f}")
HIGHER = (*[True] * len(COLUMNS), False, True)


def cells(group: Group, bold: str, underline: str, empty: str) -> Iterator[list[str]]:
    """The table of a group as text, best and second-best marked; one row alone has nothing to be best of."""
    rows = group.table()
    marks = [best_two(column, higher) for column, higher in zip(zip(*rows, strict=True), HIGHER, strict=True)]
    for row in rows:
        line = []
        for value, form, (best, second) in zip(row, FORMATS, marks, strict=True):
            text = empty if value is None else form.format(value)
            if value is not None and len(rows) > 1:
                text = bold.format(text) if value == best else underline.format(text) if value == second else text
            line.append(text)
        yield line


def markdown(groups: Sequence[Group]) -> str:
    titles = [f"{column.title} ({column.measure} ↑)" for column in COLUMNS]
    lines = [f"| Model | {' | '.join(titles)} | Avg Rank ↓ | #Top1 ↑ |", "|---|" + "---:|" * (len(COLUMNS) + 2)]
    for group in groups:
        lines.append(f"| **{_plain(group.title)}** |" + " |" * (len(COLUMNS) + 2))
        for row, line in zip(group.rows, cells(group, "**{}**", "<u>{}</u>", ""), strict=True):
            lines.append(f"| {' | '.join([_plain(row.name), *line])} |")
    return "\n".join(lines) + "\n\n" + "\n\n".join(legend(groups)) + "\n"


def latex(groups: Sequence[Group]) -> str:
    """A tabular of booktabs, with makecell and multirow."""
    width = len(COLUMNS) + 3
    tabular = "".join(f" *{{{len(columns)}}}{{c}}" for columns in (*BLOCKS.values(), range(2)))
    blocks, rules, at = [], [], 2
    for title, columns in (*BLOCKS.items(), ("Ranking", range(2))):
        blocks.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{\textbf{{{title}}}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + len(columns) - 1}}}")
        at += len(columns)
    measures = {"Acc_n": "Acc$_n$"}
    heads = [rf"\makecell{{{c.title}\\({measures.get(c.measure, c.measure)}$\uparrow$)}}" for c in COLUMNS]
    heads += [r"\makecell{Avg\\Rank$\downarrow$}", r"\makecell{\#Top1\\$\uparrow$}"]
    lines = [
        *(f"% {sentence}" for sentence in legend(groups)),
        rf"\begin{{tabular}}{{l{tabular}}}",
        r"\toprule",
        rf"\multirow{{2}}{{*}}{{\textbf{{Model}}}} & {' & '.join(blocks)} \\",
        "".join(rules),
        f"& {' & '.join(heads)} \\\\",
    ]
    for group in groups:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{escaped(group.title)}}}}} \\"]
        for row, line in zip(group.rows, cells(group, r"\textbf{{{}}}", r"\underline{{{}}}", "--"), strict=True):
            lines.append(f"{' & '.join([escaped(row.name), *line])} \\\\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def as_csv(groups: Sequence[Group]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["group", "model", "parameters", *(column.title for column in COLUMNS), "avg_rank", "top1"])
    for group in groups:
        for row, line in zip(group.rows, cells(group, "{}", "{}", ""), strict=True):
            writer.writerow([group.title, row.name, row.parameters, *line])
    return file.getvalue()


def legend(groups: Sequence[Group]) -> list[str]:
    """What a reader must know; about missing values only if some are missing."""
    shots = ", ".join(f"{column.title} {column.shots}" for column in COLUMNS if column.shots)
    text = [
        f"Shots: {shots}, others 0. Bold and underlined are the best and second-best of a group; average rank and "
        "number of firsts are within the group, and equal values share the better rank."
    ]
    rows = [row for group in groups for row in group.rows]
    if any(None in row.values for row in rows):
        text.append(
            "Some values are missing: each column is ranked among the rows that have it, and a row's average rank is "
            "over the columns that it has, so compare ranks only between rows with the same columns."
        )
    return [*text, *(note for row in rows for note in row.notes)]


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


@dataclass(frozen=True)
class Command:
    """Put evaluation results into the layout of the paper's table of language models.

    Writes table.md, table.tex and table.csv, and prints the first.
    """

    results: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Results folders of `femixer eval`, as FOLDER, NAME=FOLDER or GROUP/NAME=FOLDER. Without a group, models of
    about the same size are one."""
    out: Path = Path("results/lm-table")
    """Folder of the three files."""


def main(args: Sequence[str]) -> int:
    command = parse(Command, args, "lm table")
    check(bool(command.results), "results", command.results, "results folders of `femixer eval`")
    groups = grouped([read(argument) for argument in command.results])
    text = markdown(groups)
    command.out.mkdir(parents=True, exist_ok=True)
    for name, content in (("table.md", text), ("table.tex", latex(groups)), ("table.csv", as_csv(groups))):
        atomic.write(command.out / name, content)
    print(text)
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV")
    return 0
