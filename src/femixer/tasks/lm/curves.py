"""`femixer lm curves`: learning curves of comparisons with bands over their seeds, from folders or exported files."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from femixer.options import check, parse
from femixer.reporting import Row, Score, Table, as_markdown, marked_columns, write
from femixer.reporting.figures import banded, figure, looks, plain_log, quiet, save
from femixer.tasks.lm.records import load
from femixer.training import atomic
from femixer.training.results import Record, check_no_run

FIGURE = "curves.png"


@dataclass(frozen=True)
class Curves:
    """Validation loss of recorded comparisons, by model and text: learning curves, and how they ended.

    Writes table.md, which it prints, table.tex, table.csv and curves.png. Means and standard deviations over the seeds.
    """

    results: tuple[Path, ...]
    """Results folders of `femixer lm compare`, finished or not, or files of `femixer lm export`."""
    models: tuple[str, ...] = ()
    """Only these, in this order, by the names that the table has; otherwise all."""
    out: Path = Path("results/lm-curves")
    """Folder of the files."""


def chosen(records: Sequence[Record], models: Sequence[str]) -> Sequence[Record]:
    known = [*dict.fromkeys(record["model"] for record in records)]
    for model in models:
        check(model in known, "models", model, f"some of {'; '.join(known)}")
        check(models.count(model) == 1, "models", model, "different ones")
    return [record for model in models or known for record in records if record["model"] == model]


Runs = dict[str, dict[str, dict[int, Record]]]
"""Text -> model -> seed -> its record."""


def runs_of(records: Sequence[Record]) -> Runs:
    """Of one length of training: runs of another one cannot be compared by their ends."""
    found: Runs = defaultdict(lambda: defaultdict(dict))
    for record in records:
        named = f"{record['model']}, seed {record['seed']} on {record['text']}"
        check(len(record["curve"]) > 1, "results", named, "runs that were evaluated after their start")
        steps = [step for step, _ in record["curve"]]
        known = found[record["text"]][record["model"]]
        first = next(iter(next(iter(found[record["text"]].values())).values()), record)
        same = steps == [step for step, _ in first["curve"]] and record["experiment"] == first["experiment"]
        check(same, "results", named, f"runs of one experiment on a text: it is another than that of {first['model']}")
        check(record["seed"] not in known, "results", named, "each run once")
        known[record["seed"]] = record
    return found


def tabulate(runs: Runs) -> Table:
    """Models by texts, the best in bold. A model lacks seeds where another one of the text has more."""
    models = [*dict.fromkeys(model for by_model in runs.values() for model in by_model)]
    cells = []
    for model in models:
        held = [(by_model.get(model, {}), len({*chain(*by_model.values())})) for by_model in runs.values()]
        scores = [Score({seed: run["loss"] for seed, run in by_seed.items()}, all_) for by_seed, all_ in held]
        cells.append([score.cell(4, spread="deviation") for score in scores])
    rows: list[Row] = [[model, *row] for model, row in zip(models, marked_columns(cells, higher=False), strict=True)]
    note = (
        "Validation loss in nats per token, mean ± standard deviation over the seeds; in bold the best with all seeds."
    )
    return Table.of(("model", *runs), rows, note)


def draw(runs: Runs) -> Any:
    """A panel per text; the first evaluation, of untrained models, is left out."""
    drawing = figure(1.5 + 4.5 * len(runs), 4.4)
    styles = looks([*dict.fromkeys(model for by_model in runs.values() for model in by_model)])
    for axes, (text, by_model) in zip(drawing.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for model, by_seed in by_model.items():
            curves = np.array([record["curve"][1:] for record in by_seed.values()], dtype=float)
            banded(axes, curves[0, :, 0], curves[:, :, 1], {**styles[model], "marker": ""})
        axes.set(xlabel="steps", ylabel="validation loss (nats per token)", yscale="log", title=text)
        plain_log(axes.yaxis, (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
        quiet(axes)
        axes.legend(frameon=False, fontsize=8)
    return drawing


def main(args: Sequence[str]) -> int:
    command = parse(Curves, args, "lm curves")
    check_no_run(command.out)
    records = load(*command.results)
    check(len(records) > 0, "results", [str(path) for path in command.results], "folders with a finished run")
    runs = runs_of(chosen(records, command.models))
    table = tabulate(runs)
    with atomic.replacing_files(command.out) as new:
        save(draw(runs), new / FIGURE)
        write(new, [table])
    print(as_markdown(table))
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV, the figure is {command.out / FIGURE}")
    return 0
