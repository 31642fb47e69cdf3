"""The results folder of a run.

config.json     what was run, and with which versions
metrics.jsonl   one JSON object per evaluation and model, and per training record where they are asked for
samples.jsonl   what the model wrote at the evaluations, where it writes
tensorboard/    the same for TensorBoard (--track tensorboard)
wandb/          what Weights & Biases keeps here (--track wandb)
trackers.json   by which name trackers know the run (--track)
checkpoints/    the newest states of training
figure.png      the curves
model/          the trained model, where the run makes one for others to load
table.md        the result; it is written last, so a run is finished exactly when it is there
lock            held while a process works in the folder: one at a time. It goes with its process, however that ends
lock.json       which process, on which machine and since when
replacement/    the same files of a newer run (--overwrite), until it is finished and takes the place of this one

Several processes share one folder, in which the main one writes.
"""

import contextlib
import errno
import json
import os
import platform
import sys
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout

from femixer.damage import Damaged, check_numbers, read_json, read_lines, read_text
from femixer.optional import MissingExtra, require
from femixer.options import Count, Whole, check, check_options, check_threads, has_option
from femixer.training import atomic, distributed

CONFIG, METRICS, CHECKPOINTS, FIGURE, TABLE = "config.json", "metrics.jsonl", "checkpoints", "figure.png", "table.md"
SAMPLES, MODEL = "samples.jsonl", "model"
TENSORBOARD, WANDB, TRACKERS = "tensorboard", "wandb", "trackers.json"
FILES = (CONFIG, METRICS, SAMPLES, TENSORBOARD, WANDB, TRACKERS, CHECKPOINTS, FIGURE, MODEL, TABLE)
STORE = "store.json"
"""Of a store of many runs (femixer.training.store)."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Record = dict[str, Any]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
"""Each has the name of its package."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a run leaves on the way."""

    keep: Whole = 2
    """Checkpoints to keep, the newest ones; 0 saves none, so that a stopped run starts over."""
    save_every: Count | None = None
    """Steps between two checkpoints besides those that follow an evaluation."""
    track: tuple[Tracker, ...] = ()
    """Trackers that also receive the metrics (docs/training.md); each needs its package. Resumed runs continue."""

    def validate(self) -> None:
        check_options(self)
        for name in self.track:
            found = find_spec(name)
            if found is None or found.origin is None:  # a folder of that name is no package
                raise MissingExtra(f"track={name!r} needs a package that is not installed: pip install {name}")


@dataclass(frozen=True)
class RunOptions(Saving):
    """How a run is carried out: nothing here changes what it computes."""

    out: Path
    """Results folder."""
    resume: bool = False
    """Continue the run in the results folder, which must hold one; a finished one only shows its table again."""
    overwrite: bool = False
    """Start anew, in OUT/replacement/: the run in the results folder is replaced when the new one is complete."""
    threads: int | None = None
    """CPU threads, by default torch's choice. A resumed run repeats the digits only with the same number."""
    device: Literal["auto", "cpu"] = "auto"
    """Where to train: auto takes a GPU that torch can use through CUDA or ROCm, if there is one."""

    def apply(self) -> None:
        """Check the options, set the number of threads, and connect to the other processes if torchrun started any."""
        self.validate()
        check_threads(self.threads)
        check(not (self.resume and self.overwrite), "resume", self.resume, "either --resume or --overwrite")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        distributed.start(self.device)


class Results:
    """The results folder of one run, opened for writing."""

    def __init__(
        self, task: str, experiment: Any, run: RunOptions, others: Iterable[str] = (), about: Mapping[str, str] = {}
    ) -> None:
        """Create the folder, or check that what it holds may be resumed or overwritten.

        `experiment` is the dataclass of everything that decides the numbers: a resumed run must agree in all of it.
        others: files that this task writes besides those above. about: what config.json says besides, in words.
        """
        self.run, self.others = run, tuple(others)
        # The main process alone looks: a network disk may not show all of them the same.
        self.folder, self.finished = distributed.on_main(lambda: self._open(task, experiment, about))

    def _open(self, task: str, experiment: Any, about: Mapping[str, str]) -> tuple[Path, bool]:
        """-> where this run is, and whether it is finished."""
        run, out, new = self.run, self.run.out, self.run.out / atomic.NEW
        if atomic.is_being_replaced(out) or (new / TABLE).exists():  # a run ended, and then the process
            hold(out)
            self._replace()
        config = {"task": task, "experiment": json.loads(json.dumps(asdict(experiment), default=str))}
        held, newer = _run_in(out), (_run_in(new) if new.is_dir() and not run.overwrite else None)
        if held is not None and run.resume:
            where = out if newer is None else new
            _check_same(newer or held, config, where)
            finished = (where / TABLE).exists()
            if not finished:
                hold(out)
            return where, finished
        if held is not None and not run.overwrite:
            done = "a finished run (--resume shows its table)"
            state = done if (out / TABLE).exists() else "an unfinished run (--resume continues it)"
            if newer is not None:
                state = f"a run and in {atomic.NEW}/ an unfinished one to replace it (--resume continues that)"
            raise ValueError(f"out={str(out)!r} holds {state}; --overwrite starts anew, or choose another --out")
        if run.resume and has_option("--resume"):
            raise ValueError(f"resume=True needs a run to continue, and out={str(out)!r} holds none; leave it out")
        out.mkdir(parents=True, exist_ok=True)
        hold(out)
        where = out if held is None else atomic.begin_replacement(out)
        if where != out:
            distributed.say(f"{out}/ keeps its run until the new one, in {where}/, is complete")
        atomic.write(where / CONFIG, json.dumps({**config, **about, "environment": environment()}, indent=2) + "\n")
        return where, False

    def _replace(self) -> None:
        """Let the newer run, which is complete, take the place of the one in the results folder."""
        atomic.replace_content(self.run.out, {*FILES, *self.others}, last=(CONFIG, TABLE))
        release(self.run.out)

    def append(self, records: Iterable[Record], name: str = METRICS) -> None:
        """Add one line per record; they are on the disk when this returns. What is not finite is an error."""
        records = [*records]
        for record in records:  # in every process, which all have the same: one alone would leave the others waiting
            step = f" at step {record['step']}" if "step" in record else ""
            check_numbers(record, f"out={str(self.folder)!r}{step}")
        if not distributed.is_main():
            return
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[Record]:
        path = self.folder / METRICS
        return read_lines(path) if path.exists() else []

    def rewind(self, step: int) -> int:
        """Drop the records after `step`: training continues there and will write them again.

        Returns the last step that was recorded, -1 if none was.

        A checkpoint follows the records of its step, so whatever cannot be read is a line that a crash cut short, and
        later than any checkpoint.
        """
        last = -1
        if not distributed.is_main():
            return last
        for path in (self.folder / METRICS, self.folder / SAMPLES):
            if path.exists():
                kept = []
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        if type(at := json.loads(line)["step"]) is int:
                            last = max(last, at)
                            kept += [line + "\n"] if at <= step else []
                atomic.write(path, "".join(kept))
        return last

    def checksum(self, length: int | None = None) -> list[int]:
        """Length and checksum of metrics.jsonl, or of its beginning."""
        path = self.folder / METRICS
        content = (path.read_bytes() if path.exists() else b"")[:length]
        return [len(content), zlib.crc32(content)]

    def check_records(self, known: Sequence[int] | None) -> None:
        """Raise a ValueError unless metrics.jsonl begins as it did at the checkpoint from which training continues."""
        if known is not None and [*known] != self.checksum(known[0]):
            told = "is not what was written up to the last checkpoint; --overwrite starts anew"
            raise Damaged(f"{self.folder / METRICS} {told}")

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
        if self.folder != self.run.out:
            self._replace()
            self.folder = self.run.out
        release(self.run.out)


def holds_run(folder: Path) -> bool:
    """Whether there is a run that may be resumed."""
    return (folder / CONFIG).exists()


def show_table(results: Results) -> int:
    """Print table.md, drawn on a terminal and as it is elsewhere, and where the rest is: the exit code of a command."""
    if not distributed.is_main():
        return 0
    text = read_text(results.folder / TABLE)
    if not text.strip():
        raise Damaged(f"{results.folder / TABLE} is empty; --overwrite starts anew")
    if sys.stdout.isatty() and find_spec("rich") is not None:
        require("rich", "cli").print(require("rich.markdown", "cli").Markdown(text))
    else:
        print(text)
    model = f", the model in {results.folder / MODEL}/" if (results.folder / MODEL).is_dir() else ""
    print(f"Results are in {results.folder}/{model}")
    return 0


def check_no_run(folder: Path) -> None:
    """Raise a ValueError if files for people (tables, figures, pages) would go into the folder of a training, of a
    store or of a model: a run's table.md says that it is finished."""
    held = next((each for each in (CONFIG, STORE, METRICS) if (folder / each).is_file()), None)
    allowed = f"a folder of its own: this one holds a run, a store of results or a model ({held})"
    check(held is None, "out", str(folder), allowed)
    check(not folder.exists() or folder.is_dir(), "out", str(folder), "a folder")


@contextmanager
def new_model(folder: Path) -> Iterator[Path]:
    """A place to save a model in, which takes that of `folder` when all of it is there."""
    try:
        with atomic.replacing(folder) as partial:
            yield partial
    except Exception as error:  # each library has its own for a full disk
        raise OSError(f"{folder} could not be saved ({error}); training is, and --resume tries again") from error


def model_folder(checkpoint: Path) -> Path:
    """The model folder that `checkpoint` is, or that it holds if it is the results folder of a training.

    Raises a ValueError that says what is missing. Pickles are refused: loading one runs whatever it contains.
    """
    shown = f"checkpoint={str(checkpoint)!r}"
    state = "is a file" if checkpoint.exists() else "does not exist"
    allowed = "a model folder or a results folder of `femixer lm train`"
    check(checkpoint.is_dir(), "checkpoint", str(checkpoint), allowed, state)
    # A run that was killed while it took the place of another is in the folders of that moment.
    places = (checkpoint / name / MODEL for name in (atomic.LEAVING, atomic.ENTERING, "."))
    folder = next((place for place in places if place.is_dir()), checkpoint)
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    if not isinstance(config, dict) or "model_type" not in config:
        reason = "has no config.json of a model in it"
        if isinstance(config, dict) and "task" in config:
            reason = f"is a results folder without {MODEL}/ in it: its run has not saved a model yet"
        raise ValueError(f"{shown} {reason}")
    if any((folder / name).is_file() for name in WEIGHTS):
        return folder
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if not pickles:
        raise ValueError(f"{shown} has no weights: {folder / WEIGHTS[0]} is missing")
    raise ValueError(
        f"{shown} has its weights as a pickle ({pickles[0]}), which can run any code when it is loaded; save it again "
        "as safetensors (save_pretrained does)"
    )


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


def _run_in(folder: Path) -> Mapping[str, Any] | None:
    """The config of the run in the folder, None if it holds nothing; anything else in it is an error."""
    if not folder.exists():
        return None
    check(folder.is_dir(), "out", str(folder), "a folder")
    with contextlib.suppress(FileNotFoundError, Damaged):
        held = read_json(folder / CONFIG)
        if isinstance(held, dict) and "task" in held and isinstance(held.get("experiment"), dict):
            return held
    atomic.check_free("out", folder, (LOCK, HOLDER))
    return None


def _check_same(held: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    was, now = (_stated({"task": c["task"], **c["experiment"]}) for c in (held, config))
    if was != now:
        older = f"; without {folder}/ the older run is shown" if folder.name == atomic.NEW else ""
        told = f"holds a run with other options, which cannot be resumed: {differences(was, now)}{older}"
        raise ValueError(f"out={str(folder)!r} {told}")


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return ", ".join(f"{name} was {was.get(name)!r} and is now {now.get(name)!r}" for name in names)


def _stated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None: they may be newer than what was written."""
    kept = {name: _stated(value) if isinstance(value, Mapping) else value for name, value in options.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {}}


LOCK, HOLDER = "lock", "lock.json"
# What a disk answers that knows no locks (some network disks): there is none then, which is said.
UNKNOWN = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# By folder: a process that stopped in the middle may go on in the same folder.
_held: dict[Path, FileLock] = {}


def hold(folder: Path) -> None:
    """Lock a folder for this process, or raise a ValueError that says who works in it."""
    folder = folder.resolve()
    if folder in _held and (folder / LOCK).exists():
        return
    lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        told = f"is in use by {_holder(folder)}; wait for it to end, or choose another --out"
        raise ValueError(f"out={str(folder)!r} {told}") from None
    except (OSError, NotImplementedError) as error:
        if not isinstance(error, NotImplementedError) and error.errno not in UNKNOWN:
            raise
        warnings.warn(f"{folder} is on a disk without locks: start no second process in it", stacklevel=2)
        return
    _held[folder] = lock
    holder = {"process": os.getpid(), "machine": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    atomic.write(folder / HOLDER, json.dumps(holder) + "\n")


def release(folder: Path) -> None:
    """Let others into a folder again; nothing happens if this process does not hold it."""
    folder = folder.resolve()
    if (lock := _held.pop(folder, None)) is not None:
        give_up(lock, folder / HOLDER)


def give_up(lock: FileLock, *beside: Path) -> None:
    """Release a lock that is held; its file goes with it, and what else says who had it."""
    for path in (*beside, Path(lock.lock_file)):  # while it is held: afterwards they may be another's
        with contextlib.suppress(PermissionError):  # Windows removes no file that is open
            path.unlink(missing_ok=True)
    lock.release()


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['machine']} (since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
