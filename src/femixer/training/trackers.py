"""The metrics of a run for TensorBoard, Weights & Biases, Trackio and MLflow, written by accelerate's trackers.

A resumed run goes on in the tracker's run of the same results folder: TRACKERS in it keeps the names of the runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from femixer.optional import require
from femixer.training import atomic
from femixer.training.results import CONFIG, TENSORBOARD, TRACKERS, Results, name_of

PROJECT = "femixer"


@dataclass(frozen=True)
class Kind:
    """How one of accelerate's trackers begins or continues a run."""

    make: Callable[[Any, Results, int, str], Any]
    """(accelerate.tracking, results, step after which it continues, name of the tracker's run) -> tracker"""
    forgets: bool = False
    """Whether it drops the steps after the one from which a run is resumed; others must not be told them twice."""
    texts: bool = True
    """Whether it takes texts."""
    clean: Callable[[str], str] = lambda name: name
    """The name of a metric, as the tracker allows it."""


def _tensorboard(tracking: Any, results: Results, after: int, run: str) -> Any:
    return tracking.TensorBoardTracker(TENSORBOARD, results.folder, purge_step=after + 1)


def _wandb(tracking: Any, results: Results, after: int, run: str) -> Any:
    project, name = os.environ.get("WANDB_PROJECT", PROJECT), name_of(results.run.out)
    where = {"id": run, "name": name, "resume": "allow", "dir": str(results.folder)}
    return tracking.WandBTracker(project, config=_options(results), **where)


def _trackio(tracking: Any, results: Results, after: int, run: str) -> Any:
    name = f"{name_of(results.run.out)}-{run}"  # trackio finds a run again by its name
    return tracking.TrackioTracker(PROJECT, name=name, resume="allow", config=_options(results))


def _mlflow(tracking: Any, results: Results, after: int, run: str) -> Any:
    tag = f"{PROJECT}.run"  # MLflow gives runs their identity itself
    mlflow = require("mlflow", "mlflow")
    found = mlflow.search_runs(
        search_all_experiments=True, filter_string=f"tags.`{tag}` = '{run}'", output_format="list"
    )
    same = found[0].info.run_id if found else None
    return tracking.MLflowTracker(PROJECT, run_id=same, run_name=name_of(results.run.out), tags={tag: run})


KINDS: dict[str, Kind] = {
    "tensorboard": Kind(_tensorboard, forgets=True),
    "wandb": Kind(_wandb),
    "trackio": Kind(_trackio),
    "mlflow": Kind(_mlflow, texts=False, clean=lambda name: re.sub(r"[^\w./ :-]", "_", name)),
}


class Trackers:
    """Those that a run was asked to tell; told by the main process."""

    def __init__(self, started: Mapping[str, Any], known: int) -> None:
        """known: the last step that was recorded before the run was resumed, -1 if none was."""
        self.started, self.known = started, known

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        for name, tracker in self.started.items():
            kind = KINDS[name]
            # A resumed run repeats the steps after its checkpoint. The last of them may not have got through.
            if not kind.forgets and step < self.known:
                continue
            told = {kind.clean(key): value for key, value in values.items() if kind.texts or not isinstance(value, str)}
            if told:
                tracker.log(told, step=step)


@contextmanager
def trackers(results: Results, after: int, known: int, main: bool) -> Iterator[Trackers]:
    """The trackers of `results.run`, for the steps after `after`; in the main process, none elsewhere."""
    names = results.run.track if main else ()
    started: dict[str, Any] = {}
    try:
        if names:
            tracking, run = require("accelerate.tracking", "cli"), _run_name(results)
            with redirect_stdout(sys.stderr):  # a command's standard output is its table
                for name in names:
                    tracker = KINDS[name].make(tracking, results, after, run)
                    tracker.start()
                    started[name] = tracker
                    if name == "mlflow":
                        tracker.store_init_configuration(_options(results))
        yield Trackers(started, known)
    finally:
        with redirect_stdout(sys.stderr):
            for tracker in started.values():
                tracker.finish()


def _run_name(results: Results) -> str:
    """The name that all trackers know the run by: made once per results folder."""
    path = results.folder / TRACKERS
    if not path.exists():
        atomic.write(path, json.dumps({"run": uuid.uuid4().hex[:12]}) + "\n")
    return json.loads(path.read_text(encoding="utf-8"))["run"]


def _options(results: Results) -> dict[str, Any]:
    """The options of the experiment, on one level, as numbers and texts."""
    experiment = json.loads((results.folder / CONFIG).read_text(encoding="utf-8"))["experiment"]
    plain = {
        name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in experiment.items()
    }
    return {name: value for name, value in plain.items() if value != "null"}
