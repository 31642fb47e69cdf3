"""The finished runs of `femixer lm compare` as records with their learning curves, and `femixer lm curves`: these with
bands over the seeds, from folders or exported files."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from femixer.options import check, parse
from femixer.reporting import Row, Score, Table, marked_columns
from femixer.reporting.figures import banded, figure, looks, plain_log, quiet
from femixer.tasks.lm import TASK
from femixer.tasks.lm.fit import last
from femixer.tasks.lm.task import RUNS
from femixer.tasks.runner import report
from femixer.training import store
from femixer.training.results import CONFIG, METRICS, TABLE, Record, check_no_run


def load(*paths: Path) -> list[Record]:
    """Runs of comparisons (folders) and of exported files, each once."""
    for path in paths:
        allowed = "a results folder of `femixer lm compare`, or a file of `femixer lm export`"
        check(path.exists(), "results", str(path), allowed)
    found = [record for path in paths for record in (of_folder(path) if path.is_dir() else store.load(path, TASK.kind))]
    return [*{json.dumps(record, sort_keys=True): record for record in found}.values()]


class Run(NamedTuple):
    """A finished run of a comparison: its folder, the model's name, the seed, and what decided its numbers."""

    folder: Path
    model: str
    seed: int
    experiment: Record


def runs_of(folder: Path) -> list[Run]:
    """The finished runs of a comparison, in folders named `MODEL-seed-N`, or with spaces as they once were. Options of
    the mixers that the names of the models leave open are told behind them: `FEM-SM, start=prior`."""
    runs = []
    for path in sorted(path.parent for path in (folder / RUNS).glob(f"*/{TABLE}")):
        named = re.fullmatch(r"(.+)[ -]seed[ -](\d+)", path.name)
        check(named is not None, "results", str(path), "folders of runs named MODEL-seed-N")
        assert named is not None
        experiment = config_of(path)["experiment"]
        others = {name: value for name, value in experiment["model"].get("mixing", {}).items() if value is not None}
        model = ", ".join([named[1], *(f"{name}={value}" for name, value in others.items())])
        runs.append(Run(path, model, int(named[2]), experiment))
    return runs


def config_of(folder: Path) -> Record:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}


def comparison(folder: Path) -> Record:
    """The configuration of a comparison."""
    config = config_of(folder)
    if config.get("task") != "lm compare":
        raise ValueError(f"results={str(folder)!r} is no results folder of `femixer lm compare`")
    return config


def of_folder(folder: Path) -> list[Record]:
    config = comparison(folder)
    given = config.get("experiment", {}).get("experiment", {})  # the options that all runs share
    setting = {name: value for name, value in given.items() if name != "seed"}
    # What the mixers' options are is told with each model; they do not make another setting of it.
    setting["model"] = {name: value for name, value in setting.get("model", {}).items() if name != "mixing"}
    text = ", ".join(name_of_source(each) for each in str(config.get("text", "")).split(", "))
    return [of_run(run, text, setting) for run in runs_of(folder)]


def name_of_source(source: str) -> str:
    """A file without the folders of one's machine."""
    return Path(source).name if Path(source).is_absolute() else source


def of_run(run: Run, text: str, setting: Record) -> Record:
    lines = (run.folder / METRICS).read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    end = last(metrics)
    curve = [[record["step"], record["loss"]] for record in metrics if record["split"] == "validation"]
    return {
        "model": run.model,
        "seed": run.seed,
        "text": text,
        "loss": end["loss"],
        "bits_per_byte": end.get("bits_per_byte"),
        "experiment": setting,
        "fields": run.experiment["model"],
        "curve": curve,
    }


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


def by_text(records: Sequence[Record]) -> Runs:
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


def curves(args: Sequence[str]) -> int:
    command = parse(Curves, args, "lm curves")
    check_no_run(command.out)
    records = load(*command.results)
    check(len(records) > 0, "results", [str(path) for path in command.results], "folders with a finished run")
    runs = by_text(chosen(records, command.models))
    report(command.out, [tabulate(runs)], {FIGURE: draw(runs)})
    return 0
