"""`femixer lm table`: results of `femixer eval` in the layout of the paper's table of language models.

Rows are models, in groups of about the same size; columns are the tasks of the paper, then the average rank within the
group and the number of firsts. The best value of a group is bold and the second underlined. What the table shows, three
digits, is also what is ranked.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from femixer.damage import check_fields, read_json
from femixer.options import check, parse, positional
from femixer.reporting import Cell, Column, Group, Row, Table, half_up, marked_columns, rank
from femixer.reporting.table import Value
from femixer.tasks.lm.evaluate import RESULTS
from femixer.tasks.lm.harness import BLOCKS, COLUMNS, PaperColumn
from femixer.tasks.runner import report
from femixer.training.results import check_no_run

SAME_SIZE = 0.9
"""Models of one group have at least this share of the parameters of its largest."""


@dataclass(frozen=True)
class Evaluated:
    """A model and its values, one per column of the paper."""

    name: str
    group: str | None  # as given; None: by size
    parameters: int
    values: tuple[Value, ...]
    notes: tuple[str, ...] = ()


RESULT = {"parameters": int, "settings": {"model": str, "limit": (float, None)}, "tasks": dict}
TASK = {"shots": (int, None), "metrics": dict}


def read(argument: str) -> Evaluated:
    """A row from `FOLDER`, `NAME=FOLDER` or `GROUP/NAME=FOLDER`."""
    label, _, path = ("", "", argument) if Path(argument).is_dir() else argument.rpartition("=")
    file = Path(path) / RESULTS
    if not file.is_file():
        raise ValueError(f"results={argument!r} is no results folder of `femixer eval`: there is no readable {file}")
    content = check_fields(read_json(file), RESULT, file)
    tasks, settings, parameters = (content[name] for name in ("tasks", "settings", "parameters"))
    check(parameters > 0, f"{file}: parameters", parameters, "a whole number above 0")
    for task, one in tasks.items():
        check_fields(one, TASK, f"{file}: tasks.{task}")
        for metric, cell in one["metrics"].items():
            check_fields(cell, {"value": float}, f"{file}: tasks.{task}.metrics.{metric}")
    group, _, name = label.rpartition("/")
    name = name or settings["model"]
    notes = [] if settings["limit"] is None else [f"{name}: only a part of each task (--limit {settings['limit']:g})"]
    values = [_value(tasks, column, name, notes) for column in COLUMNS]
    return Evaluated(name, group or None, parameters, tuple(values), tuple(notes))


def _value(tasks: dict[str, Any], column: PaperColumn, name: str, notes: list[str]) -> Value:
    """The value of a column, to the digits that are shown. Other shots than the paper's would be another column."""
    task = tasks.get(column.task)
    if task is None or column.metric not in task["metrics"]:
        return None
    if task["shots"] != column.shots:
        notes.append(f"{name}: {column.title} left out, evaluated with {task['shots']} shots instead of {column.shots}")
        return None
    return round(task["metrics"][column.metric]["value"], 3)


def grouped(rows: Sequence[Evaluated]) -> dict[str, list[Evaluated]]:
    """Models by the group given, or else by size; the largest first, each group in the order given."""
    sized: list[list[Evaluated]] = []
    for row in sorted((row for row in rows if row.group is None), key=lambda row: -row.parameters):
        if not sized or row.parameters < SAME_SIZE * sized[-1][0].parameters:
            sized.append([])
        sized[-1].append(row)
    by_size = {id(row): size(fmean(one.parameters for one in same)) for same in sized for row in same}
    members: dict[str, list[Evaluated]] = defaultdict(list)
    for row in rows:
        members[row.group or f"{by_size[id(row)]} parameters"].append(row)
    return dict(sorted(members.items(), key=lambda item: -max(row.parameters for row in item[1])))


def size(parameters: float) -> str:
    """Two digits and a letter: 1.3B, 340M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.995 * unit:
            value = parameters / unit
            return f"{value:.1f}{letter}" if value < 9.95 else f"{float(f'{value:.2g}'):.0f}{letter}"
    return f"{parameters:.0f}"


SHOWN = (
    Column("Model"),
    Column("Parameters", hidden=True),
    *(
        Column(f"{column.title}\n({column.measure} ↑)", key=column.title, scores=True, block=block)
        for block, columns in BLOCKS.items()
        for column in columns
    ),
    Column("Avg\nRank ↓", key="avg_rank", scores=True, block="Ranking"),
    Column("#Top1\n↑", key="top1", scores=True, block="Ranking"),
)
HIGHER = (*[True] * len(COLUMNS), False, True)


def tabulate(models: Sequence[Evaluated]) -> Table:
    by_title = grouped(models)
    groups = [Group(rows(own), title) for title, own in by_title.items()]
    return Table(SHOWN, groups, notes=legend([*chain(*by_title.values())]), empty="")


def rows(models: Sequence[Evaluated]) -> list[Row]:
    """Of a group: values, average rank and firsts; one model alone has nothing to be best of."""
    lines = []
    for model, place in zip(models, rank([model.values for model in models]), strict=True):
        # Who has no value has not won 0 of them.
        ranks = ["", ""] if place.average is None else [f"{half_up(place.average):.2f}", f"{place.firsts:.0f}"]
        shown = ["" if value is None else f"{value:.3f}" for value in model.values]
        lines.append([Cell(value) for value in (*shown, *ranks)])
    cells = marked_columns(lines, HIGHER, second=True) if len(models) > 1 else lines
    return [[model.name, str(model.parameters), *own] for model, own in zip(models, cells, strict=True)]


def legend(rows: Sequence[Evaluated]) -> list[str]:
    """What a reader must know; about missing values only if some are missing."""
    shots = ", ".join(f"{column.title} {column.shots}" for column in COLUMNS if column.shots)
    text = [
        f"Shots: {shots}, others 0. Bold and underlined are the best and second-best of a group; average rank and "
        "number of firsts are within the group, and equal values share the better rank."
    ]
    if any(None in row.values for row in rows):
        text.append(
            "Some values are missing: each column is ranked among the rows that have it, and a row's average rank is "
            "over the columns that it has, so compare ranks only between rows with the same columns."
        )
    return [*text, *(note for row in rows for note in row.notes)]


@dataclass(frozen=True)
class LmTabulate:
    """Put evaluation results into the layout of the paper's table of language models.

    Writes table.md, table.tex and table.csv, and prints the first.
    """

    results: Annotated[tuple[str, ...], positional()]
    """Results folders of `femixer eval`, as FOLDER, NAME=FOLDER or GROUP/NAME=FOLDER.
    Without a group, models of about the same size form one."""
    out: Path = Path("results/lm-table")
    """Folder of the three files."""


def main(args: Sequence[str]) -> int:
    command = parse(LmTabulate, args, "lm table")
    check(bool(command.results), "results", command.results, "results folders of `femixer eval`")
    check_no_run(command.out)
    models = [read(argument) for argument in command.results]
    for argument, model in zip(command.results, models, strict=True):
        there = any(value is not None for value in model.values)
        tasks = ", ".join(column.task for column in COLUMNS)
        check(there, "results", argument, f"folders with at least one task of the paper's table ({tasks})")
    report(command.out, [tabulate(models)])
    return 0
