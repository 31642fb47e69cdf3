"""`femixer lm export`: the finished runs of `femixer lm compare` as one small file, with their learning curves."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from femixer.options import check, parse
from femixer.tasks.lm.fit import last
from femixer.tasks.lm.task import RUNS
from femixer.training import jobs
from femixer.training.jobs import Kind
from femixer.training.results import CONFIG, METRICS, TABLE, Record

KIND = Kind("lm", "lm 1")


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
    found = [record for path in paths for record in (of_folder(path) if path.is_dir() else jobs.load(path, KIND))]
    return [*{json.dumps(record, sort_keys=True): record for record in found}.values()]


def of_folder(folder: Path) -> list[Record]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if not isinstance(config, dict) or config.get("task") != "lm compare":
        raise ValueError(f"results={str(folder)!r} is no results folder of `femixer lm compare`")
    given = config.get("experiment", {}).get("experiment", {})  # the options that all runs share
    setting = {name: value for name, value in given.items() if name != "seed"}
    runs = sorted(path.parent for path in (folder / RUNS).glob(f"*/{TABLE}"))
    return [of_run(run, str(config.get("text", "")), setting) for run in runs]


def of_run(run: Path, text: str, setting: Record) -> Record:
    """Of a run named `MODEL-seed-N`, or with spaces as they once were."""
    named = re.fullmatch(r"(.+)[ -]seed[ -](\d+)", run.name)
    check(named is not None, "results", str(run), "folders of runs named MODEL-seed-N")
    assert named is not None
    model, seed = named.groups()
    experiment = json.loads((run / CONFIG).read_text(encoding="utf-8"))["experiment"]
    lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    end = last(metrics)
    curve = [[record["step"], record["loss"]] for record in metrics if record["split"] == "validation"]
    return {
        "model": model,
        "seed": int(seed),
        "text": text,
        "loss": end["loss"],
        "bits_per_byte": end.get("bits_per_byte"),
        "experiment": setting,
        "fields": experiment["model"],
        "curve": curve,
    }
