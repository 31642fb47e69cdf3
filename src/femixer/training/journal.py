"""What a run tells of itself: to the results folder, to trackers, and to whoever watches (a bar, or lines).

Trackers are TensorBoard, Weights & Biases, Trackio and MLflow, as accelerate writes to them. A resumed run goes on in
the tracker's run of the same results folder: TRACKERS in it keeps the names of the runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from torch import Tensor

from femixer.optional import MissingExtra, require
from femixer.training import atomic, distributed
from femixer.training.checkpoint import Position
from femixer.training.results import CONFIG, SAMPLES, TENSORBOARD, TRACKERS, Record, Results, name_of

Records = Sequence[Mapping[str, Any]]


def terminal_bar(*texts: str, **options: Any) -> Any:
    """A progress bar on standard error with these texts around it, or None where that is no terminal (or without rich).

    options: of rich.progress.Progress.
    """
    if not sys.stderr.isatty():
        return None
    try:
        rich, console = require("rich.progress", "cli"), require("rich.console", "cli").Console(stderr=True)
    except MissingExtra:
        return None
    before, *after = map(rich.TextColumn, texts)
    return rich.Progress(before, rich.BarColumn(), *after, rich.TimeRemainingColumn(), console=console, **options)


SECONDS_BETWEEN_LINES = 10.0

_shown: list[Any] = []
"""The bar of a training, above which lines stay readable and a second bar would not."""


@contextmanager
def counting(
    total: int | None, unit: str, done: int = 0, each: bool = False, **options: Any
) -> Iterator[Callable[..., None]]:
    """Gives the function that is told how many more of `total` are done, and what there is to say of it: a bar, or a
    line now and then, `3/36 jobs, 12 min left: what was said`; in the main process.

    total: None where nobody knows. done: before this began. each: whether all that is said is a line of its own, above
    the bar if there is one. options: of rich.progress.Progress.
    """
    if not distributed.is_main():
        yield lambda more, said="": None
        return
    of, before = "" if total is None else f"/{total:,}", done
    texts = (f"{{task.completed:,}}{of} {unit}", "{task.fields[said]}")
    bar = None if _shown else terminal_bar(*texts, **options)
    task = None if bar is None else bar.add_task("", total=total, completed=done, said="")
    began = shown = time.monotonic()

    def told(more: int, said: str = "") -> None:
        nonlocal done, shown
        done, now = done + more, time.monotonic()
        if bar is not None:
            if each:
                bar.console.print(said, highlight=False, markup=False)
            bar.update(task, completed=done, said="" if each else said)
        elif each or now - shown >= SECONDS_BETWEEN_LINES or (said and done == total):
            shown = now
            rest = 0 if total is None else (now - began) / max(done - before, 1) * (total - done)
            left = "" if total is None else f", {duration(rest)} left"
            distributed.say(f"{done:,}{of} {unit}{left}{said and f': {said}'}")

    with bar or nullcontext():
        yield told


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class Display:
    """What the training loop tells its watcher: a bar with the losses, the speed and the time left, below one line per
    evaluation and its samples; without a bar a line per record, and one per minute between those far apart."""

    REFRESH_SECONDS, SECONDS_BETWEEN_LINES = 0.25, 60.0

    def __init__(self, bar: Any, start: int, steps: int) -> None:
        self.bar, self.steps, self.last = bar, steps, time.monotonic()
        self.task = None if bar is None else bar.add_task("", total=steps, completed=start, loss="", rate="")

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            distributed.say(text)
            self.last = time.monotonic()

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None:
        # Reading a loss waits for the device, so not at every step.
        waited = time.monotonic() - self.last
        if self.bar is None:
            if distributed.is_main() and waited >= self.SECONDS_BETWEEN_LINES:
                shown = {name: float(value) for name, value in losses().items()}
                self.recorded(step, [{"split": "training", **shown, "rate": rate}])
        elif waited >= self.REFRESH_SECONDS or step == self.steps:
            self.last = time.monotonic()
            loss = " ".join(f"{name} {float(value):.4g}" for name, value in losses().items())
            self.bar.update(self.task, completed=step, loss=loss, rate=rate)

    def recorded(self, step: int, records: Records) -> None:
        self.say(record_line(step, self.steps, records))


def record_line(step: int, steps: int, records: Records) -> str:
    """`step 100/2000 | FEM mse 0.42 accuracy 0.07 | ...`: texts stand for themselves, numbers get their name."""

    def word(name: str, value: float | str) -> str:
        if isinstance(value, str):
            return value
        return f"{name} {value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{name} {value:.4g}"

    told = [
        " ".join(word(*item) for item in record.items() if item[0] not in ("step", "seconds") and item[1] is not None)
        for record in records
    ]
    return " | ".join([f"step {step}/{steps}", *told])


def sample_text(sample: Mapping[str, Any]) -> str:
    """`    name: its text`, indented throughout."""
    lines = "\n".join(f"{name}: {value}" for name, value in sample.items() if value != "")
    return "\n".join(f"    {line}" for line in lines.splitlines())


class Journal:
    """Records and samples of a run, from the main process."""

    def __init__(self, results: Results, shown: Display, tracked: Trackers, before: float, tokens: int | None) -> None:
        """before: seconds trained before the run was resumed; tokens: of one global batch."""
        self.results, self.shown, self.tracked, self.tokens = results, shown, tracked, tokens
        self.origin = time.monotonic() - before
        self.taken = self.lap = (0, 0.0)
        """Steps and the seconds that they took, without the evaluations in between: now, and at the last record."""

    def seconds(self) -> float:
        """Seconds of training, counted on from those before the run was resumed."""
        return time.monotonic() - self.origin

    @contextmanager
    def step(self, step: int, losses: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        """Time one step, and show it; the losses are asked for only if they are."""
        began = time.monotonic()
        yield
        self.taken = self.taken[0] + 1, self.taken[1] + time.monotonic() - began
        speed = self.per_second((0, 0.0))
        rate = f"{speed:,.1f} steps/s" if self.tokens is None else f"{speed * self.tokens:,.0f} tokens/s"
        self.shown.stepped(step, losses, rate)

    def per_second(self, since: tuple[int, float]) -> float:
        steps, seconds = self.taken[0] - since[0], self.taken[1] - since[1]
        return steps / seconds if seconds else 0.0

    def trained(self, step: int, losses: Mapping[str, float], rate: float, norm: float) -> None:
        """A training record: the losses of the global batch of this step, and how fast it went since the last."""
        record: Record = {"split": "train", **losses, "lr": rate, "grad_norm": norm}
        if self.tokens is not None:
            speed = round(self.per_second(self.lap) * self.tokens, 1)
            record |= {"tokens": step * self.tokens, "tokens_per_second": speed}
        self.lap = self.taken
        self._tell(step, [record], shown=self.shown.bar is None)

    def evaluated(self, step: int, records: Sequence[Record], samples: Sequence[Record]) -> None:
        self._tell(step, records)
        if samples:
            self.results.append([{**sample, "step": step} for sample in samples], SAMPLES)
            for number, sample in enumerate(samples):
                self.shown.say(sample_text(sample))
                told = "\n\n".join(f"**{name}**\n\n{value}" for name, value in sample.items())
                self.tracked.log({f"sample {number}": told}, step)

    def _tell(self, step: int, records: Sequence[Record], shown: bool = True) -> None:
        records = [{**record, "step": step, "seconds": round(self.seconds(), 3)} for record in records]
        self.results.append(records)
        if shown:
            self.shown.recorded(step, records)
        for record in records:
            self.tracked.log(scalars(record), step)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, each named by the record's texts and its own name: `train/loss`."""
    prefix = [value for value in record.values() if isinstance(value, str)]
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {"/".join([*prefix, name]): numbers[name] for name in numbers if name not in ("step", "seconds")}


@contextmanager
def journal(results: Results, start: Position, known: int, steps: int, tokens: int | None) -> Iterator[Journal]:
    """The journal of the steps after `start`, up to `steps`; known: the last step that was recorded before."""
    texts = ("{task.completed}/{task.total} steps", "{task.fields[loss]}", "{task.fields[rate]}")
    bar = terminal_bar(*texts) if distributed.is_main() else None
    with trackers(results, start.step, known) as tracked, bar or nullcontext():
        _shown[:] = [] if bar is None else [bar]
        try:
            yield Journal(results, Display(bar, start.step, steps), tracked, start.seconds, tokens)
        finally:
            _shown.clear()


PROJECT = "femixer"


def made(name: str, results: Results, after: int, run: str) -> Any:
    """The tracker of this name, of accelerate's, for a run that begins or continues after a step.

    run: the name of the tracker's run, by which it is found again.
    """
    tracking, title, options = require("accelerate.tracking", "cli"), name_of(results.run.out), _options(results)
    if name == "tensorboard":
        return tracking.TensorBoardTracker(TENSORBOARD, results.folder, purge_step=after + 1)
    if name == "wandb":
        where = {"id": run, "name": title, "resume": "allow", "dir": str(results.folder)}
        return tracking.WandBTracker(os.environ.get("WANDB_PROJECT", PROJECT), config=options, **where)
    if name == "trackio":  # which finds a run again by its name
        return tracking.TrackioTracker(PROJECT, name=f"{title}-{run}", resume="allow", config=options)
    tag = f"{PROJECT}.run"  # MLflow gives runs their identity itself
    found = require("mlflow", "mlflow").search_runs(
        search_all_experiments=True, filter_string=f"tags.`{tag}` = '{run}'", output_format="list"
    )
    same = found[0].info.run_id if found else None
    return tracking.MLflowTracker(PROJECT, run_id=same, run_name=title, tags={tag: run})


class Trackers:
    """Those that a run was asked to tell; told by the main process."""

    def __init__(self, started: Mapping[str, Any], known: int) -> None:
        """known: the last step that was recorded before the run was resumed, -1 if none was."""
        self.started, self.known = started, known

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        for name, tracker in self.started.items():
            # A resumed run repeats the steps after its checkpoint, and TensorBoard alone forgets those that it has. The
            # last of them may not have got through.
            if name != "tensorboard" and step < self.known:
                continue
            told = dict(values)
            if name == "mlflow":  # which takes no texts, and not every name
                numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
                told = {re.sub(r"[^\w./ :-]", "_", key): value for key, value in numbers.items()}
            if told:
                tracker.log(told, step=step)


@contextmanager
def trackers(results: Results, after: int, known: int) -> Iterator[Trackers]:
    """The trackers of `results.run`, for the steps after `after`; in the main process, none elsewhere."""
    started: dict[str, Any] = {}
    names, known_as = results.run.track if distributed.is_main() else (), results.folder / TRACKERS
    if names and not known_as.exists():  # once per results folder: the name that all trackers know the run by
        atomic.write(known_as, json.dumps({"run": uuid.uuid4().hex[:12]}) + "\n")
    try:
        with redirect_stdout(sys.stderr):  # a command's standard output is its table
            for name in names:
                tracker = made(name, results, after, json.loads(known_as.read_text(encoding="utf-8"))["run"])
                tracker.start()
                started[name] = tracker
                if name == "mlflow":
                    tracker.store_init_configuration(_options(results))
        yield Trackers(started, known)
    finally:
        with redirect_stdout(sys.stderr):
            for tracker in started.values():
                tracker.finish()


def _options(results: Results) -> dict[str, Any]:
    """The options of the experiment, on one level, as numbers and texts."""
    experiment = json.loads((results.folder / CONFIG).read_text(encoding="utf-8"))["experiment"]
    given = {name: value for name, value in experiment.items() if value is not None}
    return {name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in given.items()}
