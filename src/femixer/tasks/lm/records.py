"""`femixer lm export`: the finished runs of `femixer lm compare` as one small file, with their learning curves."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from femixer.options import check, parse
from femixer.tasks.lm.fit import last
from femixer.tasks.lm.task import RUNS
from femixer.training import jobs
from femixer.training.jobs import Kind
from femixer.training.results import CONFIG, METRICS, TABLE, Record

RECORD = {"model": str, "seed": int, "text": str, "loss": float, "experiment": dict, "curve": [[float]]}
KIND = Kind("lm", "lm 1", RECORD)


@dataclass(frozen=True)
class Export:
    """Write the finished runs of one or more comparisons into one JSON file, which `femixer evidence` reads."""

    results: tuple[Path, ...]
    """Results folders of `femixer lm compare`, finished or not, or files that this command wrote."""
    out: Path
    """The file."""


def export(args: Sequence[str]) -> int:
    command = parse(Export, args, "lm export")
    records = load(*command.results)
    check(len(records) > 0, "results", [str(path) for path in command.results], "folders with a finished run")
    jobs.export(records, command.out, KIND)
    print(f"{len(records)} runs are in {command.out}")
    return 0


def load(*paths: Path) -> list[Record]:
    """Runs of comparisons (folders) and of exported files, each once."""
    for path in paths:
        allowed = "a results folder of `femixer lm compare`, or a file of `femixer lm export`"
        check(path.exists(), "results", str(path), allowed)
    found = [record for path in paths for record in (of_folder(path) if path.is_dir() else jobs.load(path, KIND))]
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
