"""The results folder of a run.

config.json     what was run, and with which versions
metrics.jsonl   one JSON object per evaluation and model, and per training record where they are asked for
samples.jsonl   what the model wrote at the evaluations, where it writes
tensorboard/    the same for TensorBoard (--tensorboard)
checkpoints/    the newest states of training
figure.png      the curves
model/          the trained model, where the run makes one for others to load
table.md        the result; it is written last, so a run is finished exactly when it is there
lock            while a process works in the folder, and lock.json: which

Several processes share one folder, in which the main one writes.
"""

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from femixer.optional import MissingExtra, require
from femixer.options import check
from femixer.training import atomic, distributed, locks

CONFIG, METRICS, CHECKPOINTS, FIGURE, TABLE = "config.json", "metrics.jsonl", "checkpoints", "figure.png", "table.md"
SAMPLES, TENSORBOARD, MODEL = "samples.jsonl", "tensorboard", "model"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Record = dict[str, Any]


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out: nothing here changes what it computes."""

    out: Path
    """Results folder."""
    resume: bool = False
    """Continue the run in the results folder, if there is one; a finished one only shows its table again."""
    overwrite: bool = False
    """Delete the run in the results folder and start anew."""
    threads: int | None = None
    """CPU threads, by default torch's choice. A resumed run repeats the digits only with the same number."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: auto takes a GPU that torch can use through CUDA or ROCm, if there is one."""
    keep: int = 2
    """Checkpoints to keep, the newest ones; 0 saves none, so that a stopped run starts over."""
    save_every: int | None = None
    """Steps between two checkpoints besides those that follow an evaluation."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too, into tensorboard/ of the results folder."""

    def apply(self) -> None:
        """Check the options, set the number of threads, and connect to the other processes if torchrun started any."""
        check(self.device in ("auto", "cpu"), "device", self.device, "auto or cpu")
        check(self.keep >= 0, "keep", self.keep, "a whole number of at least 0")
        check(self.save_every is None or self.save_every > 0, "save_every", self.save_every, "a whole number above 0")
        check(self.threads is None or self.threads > 0, "threads", self.threads, "a whole number above 0")
        check(not (self.resume and self.overwrite), "resume", self.resume, "either --resume or --overwrite")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        distributed.start(self.device)


class Results:
    """The results folder of one run, opened for writing."""

    def __init__(
        self,
        task: str,
        experiment: Any,
        run: RunOptions,
        others: Sequence[str] = (),
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Create the folder, or check that what it holds may be resumed or overwritten.

        `experiment` is the dataclass of everything that decides the numbers: a resumed run must agree in all of it.
        others: files that this task writes besides those above. about: what config.json says besides, in words.
        """
        self.folder, self.run = run.out, run
        # The main process alone looks: a network disk may not show all of them the same.
        self.finished = distributed.on_main(lambda: self._open(task, experiment, others, about or {}))

    def _open(self, task: str, experiment: Any, others: Sequence[str], about: Mapping[str, str]) -> bool:
        """-> whether the folder holds this run, finished."""
        run, finished = self.run, (self.folder / TABLE).exists()
        config = {"task": task, "experiment": json.loads(json.dumps(asdict(experiment), default=str))}
        held = self._held()
        if held is not None and run.resume:
            _check_same(held, config, self.folder)
            if not finished:
                locks.hold(self.folder)
            return finished
        if held is not None and not run.overwrite:
            if finished:
                state = "a finished run (--resume shows its table)"
            else:
                state = "an unfinished run (--resume continues it)"
            raise ValueError(f"out={str(run.out)!r} holds {state}; --overwrite starts anew, or choose another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        locks.hold(self.folder)
        # In this order whatever is left after a crash is a run that can be resumed or overwritten.
        for name in (TABLE, MODEL, CHECKPOINTS, METRICS, SAMPLES, TENSORBOARD, FIGURE, *others):
            atomic.remove(self.folder / name)
        atomic.write(
            self.folder / CONFIG, json.dumps({**config, **about, "environment": environment()}, indent=2) + "\n"
        )
        return False

    def append(self, records: Iterable[Record], name: str = METRICS) -> None:
        """Add one line per record; they are on the disk when this returns."""
        if not distributed.is_main():
            return
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[Record]:
        path = self.folder / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: training continues there and will write them again.

        A checkpoint follows the records of its step, so whatever cannot be read is a line that a crash cut short, and
        later than any checkpoint.
        """
        if not distributed.is_main():
            return
        for path in (self.folder / METRICS, self.folder / SAMPLES):
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
                atomic.write(path, "".join(line + "\n" for line in kept))

    def write_figure(self, figure: Any) -> None:
        if not distributed.is_main():
            return
        with atomic.replacing(self.folder / FIGURE) as partial:
            figure.savefig(partial, format="png")

    def finish(self, table: str) -> None:
        """Write table.md, after which the run is finished."""
        self.finished = True
        if not distributed.is_main():
            return
        atomic.write(self.folder / TABLE, table)
        locks.release(self.folder)

    def _held(self) -> Mapping[str, Any] | None:
        """The config of the run in the folder, None if it holds nothing; anything else in it is an error."""
        if not self.folder.exists():
            return None
        check(self.folder.is_dir(), "out", str(self.folder), "a folder")
        path = self.folder / CONFIG
        if path.exists():
            try:
                held = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                held = None
            if isinstance(held, dict) and "task" in held and isinstance(held.get("experiment"), dict):
                return held
        own = (locks.LOCK, locks.HOLDER)
        strangers = sorted(e.name for e in self.folder.iterdir() if e.suffix != atomic.PARTIAL and e.name not in own)
        holds = ", ".join(strangers[:3])
        check(not strangers, "out", str(self.folder), f"a new or empty folder (this one holds {holds})")
        return None


def show_table(results: Results) -> int:
    """Print table.md, drawn on a terminal and as it is elsewhere, and where the rest is: the exit code of a command."""
    if not distributed.is_main():
        return 0
    text = (results.folder / TABLE).read_text(encoding="utf-8")
    try:
        drawn = require("rich.markdown", "cli").Markdown(text) if sys.stdout.isatty() else None
    except MissingExtra:
        drawn = None
    if drawn is None:
        print(text)
    else:
        require("rich", "cli").print(drawn)
    model = f", the model in {results.folder / MODEL}/" if (results.folder / MODEL).is_dir() else ""
    print(f"Results are in {results.folder}/{model}")
    return 0


@contextmanager
def new_model(folder: Path) -> Iterator[Path]:
    """A place to save a model in, which takes that of `folder` when all of it is there."""
    try:
        atomic.remove(folder)
        with atomic.replacing(folder) as partial:
            yield partial
    except Exception as error:  # each library has its own for a full disk
        raise OSError(f"{folder} could not be saved ({error}); training is, and --resume tries again") from error


def model_folder(checkpoint: Path) -> Path:
    """The model folder that `checkpoint` is, or that it holds if it is the results folder of a training.

    Raises a ValueError that says what is missing. Pickles are refused: loading one runs whatever it contains.
    """
    shown = str(checkpoint)
    if not checkpoint.is_dir():
        state = "is a file" if checkpoint.exists() else "does not exist"
        raise ValueError(
            f"checkpoint={shown!r} {state}; choose a model folder or a results folder of `femixer lm train`"
        )
    folder = checkpoint / MODEL if (checkpoint / MODEL).is_dir() else checkpoint
    config = _config(folder)
    if config is None or "model_type" not in config:
        reason = "has no config.json of a model in it"
        if config is not None and "task" in config:
            reason = f"is a results folder without {MODEL}/ in it: its run has not saved a model yet"
        raise ValueError(f"checkpoint={shown!r} {reason}")
    if not any((folder / name).is_file() for name in WEIGHTS):
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"checkpoint={shown!r} has its weights as a pickle ({pickles[0]}), which can run any code when it is "
                f"loaded; save it again as safetensors (save_pretrained does)"
            )
        raise ValueError(f"checkpoint={shown!r} has no weights: {folder / WEIGHTS[0]} is missing")
    return folder


def name_of(checkpoint: Path) -> str:
    """What to call a checkpoint: the name of its folder, or of the results folder around `model/`."""
    path = checkpoint.resolve()
    return path.parent.name if path.name == MODEL else path.name


def environment() -> dict[str, Any]:
    """What the digits of a run can depend on besides its options."""
    return {
        "femixer": version("femixer"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _check_same(held: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    was, now = (_stated({"task": c["task"], **c["experiment"]}) for c in (held, config))
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    if names:
        differences = ", ".join(f"{name} was {was.get(name)!r} and is now {now.get(name)!r}" for name in names)
        raise ValueError(f"out={str(folder)!r} holds a run with other options, which cannot be resumed: {differences}")


def _stated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None: they may be newer than what was written."""
    kept = {name: _stated(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {}}


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
