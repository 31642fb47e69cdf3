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
from dataclasses import dataclass
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
def counting(total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Gives the function that is told how many more of `total` are done: a bar, or a line now and then; in the main
    process.

    total: None where nobody knows.
    """
    if not distributed.is_main():
        yield lambda more: None
        return
    bar = (
        None
        if _shown
        else terminal_bar("{task.completed:,}" + (f"/{total:,} {unit}" if total is not None else f" {unit}"))
    )
    task = None if bar is None else bar.add_task("", total=total)
    done, began = 0, time.monotonic()
    shown = began

    def told(more: int) -> None:
        nonlocal done, shown
        done, now = done + more, time.monotonic()
        if bar is not None:
            bar.advance(task, more)
        elif now - shown >= SECONDS_BETWEEN_LINES:
            shown = now
            of, left = "", ""
            if total is not None:
                of, left = f" of {total:,}", f", {(now - began) / max(done, 1) * (total - done):.0f} s left"
            print(f"{done:,}{of} {unit}{left}", file=sys.stderr, flush=True)

    with bar or nullcontext():
        yield told


@contextmanager
def display(start: int, steps: int, shown: bool = True) -> Iterator[Display]:
    """The display that suits standard error, for steps `start` to `steps`, or one that shows nothing."""
    texts = ("{task.completed}/{task.total} steps", "{task.fields[loss]}", "{task.fields[rate]}")
    bar = terminal_bar(*texts) if shown else None
    if bar is None:
        yield (Lines if shown else Display)(steps)
        return
    with bar:
        _shown.append(bar)
        try:
            yield Bar(bar, start, steps)
        finally:
            _shown.pop()


class Display:
    """What the training loop tells its watcher; this one shows nothing."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def say(self, text: str) -> None: ...

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None: ...

    def trained(self, step: int, records: Records) -> None: ...

    def evaluated(self, step: int, records: Records) -> None:
        self.say(record_line(step, self.steps, records))

    def sampled(self, samples: Records) -> None:
        for sample in samples:
            self.say(sample_text(sample))


class Lines(Display):
    """One line per record, and the samples; between records that are far apart, one per minute."""

    SECONDS = 60.0

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.last = time.monotonic()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self.last = time.monotonic()

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None:
        if time.monotonic() - self.last >= self.SECONDS:
            shown = {name: float(value) for name, value in losses().items()}
            self.evaluated(step, [{"split": "training", **shown, "rate": rate}])

    def trained(self, step: int, records: Records) -> None:
        self.evaluated(step, records)


class Bar(Display):
    """A bar with the losses, the speed and the time left, below one line per evaluation and its samples."""

    REFRESH_SECONDS = 0.25

    def __init__(self, bar: Any, start: int, steps: int) -> None:
        super().__init__(steps)
        self.bar = bar
        self.drawn = time.monotonic()
        self.task = bar.add_task("", total=steps, completed=start, loss="", rate="")

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False)

    def stepped(self, step: int, losses: Callable[[], Mapping[str, Tensor]], rate: str) -> None:
        now = time.monotonic()
        # Reading a loss waits for the device, so not at every step.
        if now - self.drawn < self.REFRESH_SECONDS and step < self.steps:
            return
        self.drawn = now
        loss = " ".join(f"{name} {float(value):.4g}" for name, value in losses().items())
        self.bar.update(self.task, completed=step, loss=loss, rate=rate)


def record_line(step: int, steps: int, records: Records) -> str:
    """`step 100/2000 | FEM mse 0.42 accuracy 0.07 | ...`: texts stand for themselves, numbers get their name."""

    def words(record: Mapping[str, Any]) -> Iterator[str]:
        for name, value in record.items():
            if name not in ("step", "seconds") and value is not None:
                yield value if isinstance(value, str) else f"{name} {number(value)}"

    return " | ".join([f"step {step}/{steps}", *(" ".join(words(record)) for record in records)])


def number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


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
        self.speed, self.lap = Speed(), Speed()

    def seconds(self) -> float:
        """Seconds of training, counted on from those before the run was resumed."""
        return time.monotonic() - self.origin

    @contextmanager
    def step(self, step: int, losses: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
        """Time one step, and show it; the losses are asked for only if they are."""
        began = time.monotonic()
        yield
        for speed in (self.speed, self.lap):
            speed.add(time.monotonic() - began)
        self.shown.stepped(step, losses, self.rate(self.speed))

    def rate(self, speed: Speed) -> str:
        unit = self.tokens or 1
        return f"{speed.per_second() * unit:,.{0 if self.tokens else 1}f} {'tokens' if self.tokens else 'steps'}/s"

    def trained(self, step: int, losses: Mapping[str, float], rate: float, norm: float) -> None:
        """A training record: the losses of the global batch of this step, and how fast it went since the last."""
        record: Record = {"split": "train", **losses, "lr": rate, "grad_norm": norm}
        if self.tokens is not None:
            record |= {"tokens": step * self.tokens, "tokens_per_second": round(self.lap.per_second() * self.tokens, 1)}
        self.lap = Speed()
        self._tell(step, [record], self.shown.trained)

    def evaluated(self, step: int, records: Sequence[Record], samples: Sequence[Record]) -> None:
        self._tell(step, records, self.shown.evaluated)
        if samples:
            self.results.append([{**sample, "step": step} for sample in samples], SAMPLES)
            self.shown.sampled(samples)
            told = {f"sample {number}": markdown(sample) for number, sample in enumerate(samples)}
            self.tracked.log(told, step)

    def _tell(self, step: int, records: Sequence[Record], show: Callable[[int, Sequence[Record]], None]) -> None:
        records = [{**record, "step": step, "seconds": round(self.seconds(), 3)} for record in records]
        self.results.append(records)
        show(step, records)
        for record in records:
            self.tracked.log(scalars(record), step)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, each named by the record's texts and its own name: `train/loss`."""
    prefix = [value for value in record.values() if isinstance(value, str)]
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {"/".join([*prefix, name]): numbers[name] for name in numbers if name not in ("step", "seconds")}


def markdown(sample: Record) -> str:
    return "\n\n".join(f"**{name}**\n\n{value}" for name, value in sample.items())


class Speed:
    """Steps per second of training, without the evaluations in between."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds

    def per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


@contextmanager
def journal(results: Results, start: Position, known: int, steps: int, tokens: int | None) -> Iterator[Journal]:
    """The journal of the steps after `start`, up to `steps`; known: the last step that was recorded before."""
    main = distributed.is_main()
    with trackers(results, start.step, known, main) as tracked, display(start.step, steps, main) as shown:
        yield Journal(results, shown, tracked, start.seconds, tokens)


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
