"""Damaged folders and impossible options: `python tests/support/fuzz.py --cases 5000 --seed 7` tries any number.

A case takes a folder that a command reads, damages it in one way, and runs the command; or runs it with an option that
cannot be. It must end with exit code 2 and one line that names the folder (or the option), or with the result of the
undamaged folder: a traceback, or another result, is a failure.
"""

import argparse
import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from started import Ended, command

from femixer.cli import main

WRONG = (None, "x", "", -1, 0, 10**9, 10**30, 1.5, -2.5, math.nan, math.inf, [], [1, "x"], {}, {"x": 1}, True)
OPTIONS = ("-1", "0", "x", "", "nan", "inf", "1e30", "99999999999999999999", "1000000000", "-0.5", "\x01", "é" * 300)
MANY = "1000000000"
ENDLESS = ("--steps", "--max-tokens")  # so many are possible, and take their time
# Numbers of which any may be meant, and words that nothing depends on.
FREE = re.compile(
    r"rope_base|eps$|initializer_range|scaler_|version|environment|seconds|checkpoint$|^text$|^data$|transformers|dtype"
    r"|tokens_per_second|evaluations|parameter_count|best_step|steps|summary|temperature|max_length|beta|lr$|limit"
)


@dataclass(frozen=True)
class Subject:
    """A folder, what reads it, and what it gives: compared between a damaged folder and the one it was."""

    folder: Path
    commands: tuple[tuple[str, ...], ...]  # FOLDER and OUT stand for the two places
    options: tuple[str, ...] = ()  # numbers that the first command takes
    result: Callable[[str, Path], str] = lambda shown, out: shown


@dataclass(frozen=True)
class Case:
    """One damage, or one option."""

    subject: str
    command: tuple[str, ...]
    told: str  # what was done
    exact: bool  # whether exit code 0 needs the undamaged result
    file: str = ""  # the damaged one, "" for an option
    content: bytes | None = None  # what it holds now, None: it is gone


def in_process(args: list[str], stdin: str = "") -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = main(args)
        except SystemExit as stop:  # how tyro refuses an option
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException as error:
            return Ended(-1, out.getvalue(), f"{err.getvalue()}Traceback: {type(error).__name__}: {error}")
    return Ended(code, out.getvalue(), err.getvalue())


def started(args: list[str]) -> Ended:
    return command(*args).end()


def places(content: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Where there are values in JSON."""
    if path:
        yield path
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in [*inner][:40]:
        yield from places(value, (*path, name))


def with_field(text: str, chance: random.Random) -> tuple[bytes, str, bool]:
    """JSON with one field that is wrong, or gone."""
    content = json.loads(text)
    chosen = chance.choice([*places(content)])
    value = chance.choice((*WRONG, "gone"))
    at = content
    for name in chosen[:-1]:
        at = at[name]
    old = at[chosen[-1]]
    if value == "gone":
        del at[chosen[-1]]
    else:
        at[chosen[-1]] = value
    # Another number, or another text, may be meant.
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (old, value))
    free = numbers or type(old) is type(value) or any(FREE.search(str(name)) for name in chosen)
    shown = ".".join(map(str, chosen))
    return json.dumps(content).encode(), f"{shown}={value!r}", not free


def damaged(path: Path, chance: random.Random) -> tuple[bytes | None, str, bool]:
    """What the file holds now, what was done to it, and whether a result must be the old one."""
    raw = path.read_bytes()
    way = chance.choice(("gone", "empty", "cut", "noise", *["field"] * 6))
    if path.suffix == ".safetensors" and way == "field":
        return with_weights(path, chance)
    if path.suffix == ".json" and way == "field":
        return with_field(raw.decode(), chance)
    if path.suffix == ".jsonl" and way == "field":
        lines = raw.decode().splitlines()
        number = chance.randrange(len(lines))
        line, told, exact = with_field(lines[number], chance)
        lines[number] = line.decode()
        return "\n".join([*lines, ""]).encode(), f"line {number + 1} {told}", exact
    if way == "gone":
        return None, "gone", True
    if way == "empty":
        return b"", "empty", True
    if way == "cut":
        at = chance.randrange(max(1, len(raw)))
        return raw[:at], f"cut at {at}", path.suffix not in (".csv", ".md", ".yaml")
    # The head of a file of numbers says what they are; of the numbers themselves, any may be meant.
    at = [chance.randrange(min(len(raw), 64) or 1) for _ in range(4)]
    noisy = bytearray(raw or b"x")
    for place in at:
        noisy[place] ^= chance.randrange(1, 256)
    return bytes(noisy), f"noise at {at}", path.suffix in (".json", ".safetensors")


def with_weights(path: Path, chance: random.Random) -> tuple[bytes, str, bool]:
    weights = load_file(path)
    name = chance.choice(sorted(weights))
    way = chance.choice(("gone", "nan", "inf", "shape", "more", "whole numbers"))
    old = weights[name]
    if way == "gone":
        del weights[name]
    elif way == "more":
        weights["nobody.knows"] = torch.zeros(2)
    else:
        new = {
            "nan": lambda: torch.full_like(old.float(), math.nan),
            "inf": lambda: torch.full_like(old.float(), math.inf),
            "shape": lambda: torch.zeros(*old.shape, 2),
            "whole numbers": lambda: torch.ones(old.shape, dtype=torch.int64),
        }
        weights[name] = new[way]()
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder) / "x", metadata={"format": "pt"})
        # An empty weight has no number to be wrong.
        return (Path(folder) / "x").read_bytes(), f"{name} {way}", way != "whole numbers" and old.numel() > 0


IGNORED = ("README.md", "femixer_models.py", "lock", "lock.json", "figure.png", "samples.jsonl", ".gitattributes")


def cases(subjects: dict[str, Subject], count: int, seed: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for _ in range(count):
        name = chance.choice(sorted(subjects))
        subject = subjects[name]
        if subject.options and chance.random() < 0.2:
            option, value = chance.choice(subject.options), chance.choice(OPTIONS)
            if value == MANY and option in ENDLESS:
                continue
            yield Case(name, (*subject.commands[0], f"{option}={value}"), f"{option}={value!r}", exact=False)
            continue
        files = sorted(path for path in subject.folder.rglob("*") if path.is_file() and path.name not in IGNORED)
        path = chance.choice(files)
        content, told, exact = damaged(path, chance)
        file = str(path.relative_to(subject.folder))
        # A store may have any number of records.
        exact &= not (content is None and path.parent.name == "jobs")
        yield Case(name, chance.choice(subject.commands), f"{file}: {told}", exact, file, content)


class Trial:
    """Runs cases, each in a copy of its folder."""

    def __init__(self, subjects: dict[str, Subject], place: Path) -> None:
        self.subjects, self.place, self.number = subjects, place, 0
        self.known: dict[tuple[str, tuple[str, ...]], str] = {}

    def run(self, case: Case, run: Callable[[list[str]], Ended] = in_process) -> str | None:
        """What is wrong with how the case ended, None if nothing is."""
        subject = self.subjects[case.subject]
        outcome, result, folder = self._carried_out(case, subject, run)
        if outcome.code == 2:
            return wrong_refusal(outcome, folder if case.file else None)
        if outcome.code != 0:
            return f"exit code {outcome.code}: {outcome.err[-600:]}"
        if not case.exact:
            return None
        key = (case.subject, case.command)
        if key not in self.known:
            whole = Case(case.subject, case.command, "nothing", True)
            first, self.known[key], _ = self._carried_out(whole, subject, in_process)
            assert first.code == 0, (case.command, first.err)
        if result != self.known[key]:
            return f"exit code 0 with another result:\n{result[:500]}\ninstead of\n{self.known[key][:500]}"
        return None

    def _carried_out(self, case: Case, subject: Subject, run: Callable[[list[str]], Ended]) -> tuple[Ended, str, Path]:
        self.number += 1
        own = self.place / f"case {self.number}"
        folder, out = own / "it", own / "out"
        shutil.copytree(subject.folder, folder)
        if case.file:
            (folder / case.file).unlink()
            if case.content is not None:
                (folder / case.file).write_bytes(case.content)
        args = [word.replace("FOLDER", str(folder)).replace("OUT", str(out)) for word in case.command]
        outcome = run(args)
        shown = outcome.out.replace(str(own), "OWN")
        result = subject.result(shown, out if "OUT" in " ".join(case.command) else folder) if outcome.code == 0 else ""
        shutil.rmtree(own)
        return outcome, result.replace(str(own), "OWN"), folder


def wrong_refusal(outcome: Ended, folder: Path | None) -> str | None:
    lines = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    if "Traceback" in outcome.err or "(unexpected, perhaps" in outcome.err:
        return outcome.err[-1500:]
    if folder is None:
        return None if lines or "--help" in outcome.err else f"no reason was given: {outcome.err[-500:]}"
    if len(lines) != 1 or outcome.err.splitlines()[-1] != lines[0]:
        return f"not one line: {outcome.err[-800:]}"
    mixed = "results mix different" in lines[0]  # which of two records is the wrong one, nobody knows
    return None if mixed or str(folder) in lines[0] else f"does not name the folder: {lines[0]}"


# --- The folders, each as its command writes it -----------------------------------------------------------------------

SIZES = ("--layers", "1", "--hidden-size", "16", "--heads", "2", "--context", "16", "--batch-tokens", "64")
TRAIN = ("lm", "train", *SIZES, "--steps", "2", "--evaluate-every", "2", "--validation-tokens", "32")
TRAIN += ("--sample-tokens", "2", "--threads", "1")


def without_speed(shown: str, out: Path) -> str:
    """A language model's table, but not how fast it was; and its weights, which the digits are of."""
    table = re.sub(r"\| [\d,.]+ \|$", "|", (out / "table.md").read_text(), flags=re.MULTILINE)
    return table + str(
        sum(float(value.double().sum()) for value in load_file(out / "model/model.safetensors").values())
    )


def forecast_of(shown: str, out: Path) -> str:
    return (out / "forecast.csv").read_text() if (out / "forecast.csv").exists() else (out / "table.csv").read_text()


def make(place: Path) -> dict[str, Subject]:
    """A small folder of each kind."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from femixer.models import FEMForImageClassification, FEMVisionConfig
    from femixer.models.forecast import ForecastConfig, build
    from femixer.tasks.forecast import TASK
    from femixer.tasks.forecast.task import ForecastRun
    from femixer.tasks.lm.data.tokenizer import load_tokenizer
    from femixer.tasks.vision.data import Preparation
    from femixer.tasks.vision.model import Classifier
    from femixer.training import RunOptions
    from femixer.training.store import Store

    torch.manual_seed(0)
    text = place / "text.txt"
    text.write_text("".join(f"line {n} of some text\n" for n in range(300)), encoding="utf-8")
    for args in (
        ["lm", "data", "--data", str(text), "--shards", str(place / "data")],
        [*TRAIN, "--shards", str(place / "data"), "--out", str(place / "run")],
    ):
        done = in_process(args)
        assert done.code == 0, done.err
    shutil.copytree(place / "run/model", place / "language")
    shutil.copytree(place / "run", place / "stopped")
    (place / "stopped/table.md").unlink()
    shutil.rmtree(place / "stopped/model")

    sizes = {"n_embd": 12, "n_layer": 1, "n_head": 2, "n_positions": 24, "vocab_size": 257}
    ends = {"bos_token_id": 256, "eos_token_id": 256}
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(place / "gpt2")
    load_tokenizer("bytes").save_pretrained(place / "gpt2")
    assert in_process(["upgrade", str(place / "gpt2"), "--out", str(place / "upgraded"), "--rank", "2"]).code == 0

    config = FEMVisionConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=10, id2label={n: str(n) for n in range(10)},
    )  # fmt: skip
    Classifier(FEMForImageClassification(config), Preparation(8, 1)).save(place / "vision")

    rows = np.cumsum(np.random.default_rng(0).normal(size=(200, 2)), 0)
    dates = np.arange("2020-01-01", "2020-01-09T08", dtype="datetime64[h]")
    lines = [f"{date},{a:.4f},{b:.4f}" for date, (a, b) in zip(dates, rows, strict=True)]
    (place / "series").mkdir()
    (place / "series/series.csv").write_text("\n".join(["date,a,=b", *lines, ""]))
    series = str(place / "series/series.csv")
    forecast = {"channels": 2, "lookback": 24, "horizon": 6, "columns": ["a", "=b"], "frequency": "h"}
    build(ForecastConfig(kind="dlinear", **forecast)).save_pretrained(place / "forecast")
    how = ["--models", "DLinear", "LastValue", "--data", series, "--horizons", "6", "--lookback", "24", "--epochs", "1"]
    with contextlib.redirect_stderr(io.StringIO()):
        for number, job in enumerate(ForecastRun.parse(how, "forecast run").jobs()):
            record = job.carry_out(RunOptions(place / f"job {number}", threads=1))
            Store(place / "store", TASK.kind).add(job.name, record)
    (place / "evaluated").mkdir()
    metrics = {"acc_norm": {"value": 0.25, "stderr": 0.01, "higher_is_better": True}}
    tasks = {"piqa": {"shots": 0, "samples": 8, "version": 1, "metrics": metrics}}
    settings = {"model": "tiny", "fingerprint": "x", "dtype": "auto", "max_length": None, "limit": None}
    content = {"checkpoint": "tiny", "parameters": 1234, "settings": settings, "versions": {}, "tasks": tasks}
    (place / "evaluated/results.json").write_text(json.dumps(content))
    (place / "recipe").mkdir()
    (place / "recipe/own.yaml").write_text("lr: 1.0e-3\nsteps: 2\nbatch_tokens: 64\nseed: 3\n")

    generate = ("generate", "FOLDER", "--prompt", "line", "--max-tokens", "6")
    predict = ("forecast", "predict", "--model", "FOLDER", "--data", series, "--out", "OUT")
    read = ("forecast", "predict", "--model", str(place / "forecast"), "--data", "FOLDER/series.csv", "--out", "OUT")
    numbers = ("--max-tokens", "--temperature", "--top-k", "--beams", "--seed")
    trains = ("--layers", "--hidden-size", "--heads", "--context", "--batch-tokens", "--steps", "--lr", "--window")
    trains += ("--dropout", "--seed", "--clip", "--threads", "--keep", "--validation-tokens", "--kv-heads")
    resume = (*TRAIN, "--shards", str(place / "data"), "--out", "FOLDER", "--resume")
    look = ("inspect", "FOLDER", "--text", "line", "--out", "OUT")
    page = lambda shown, out: (out / "summary.md").read_text() if (out / "summary.md").exists() else shown  # noqa: E731
    picture = ("vision", "eval", "--model", "FOLDER", "--data", "digits", "--split", "validation", "--out", "OUT")
    scores = lambda shown, out: (out / "scores.json").read_text()  # noqa: E731
    return {
        "language": Subject(place / "language", (generate, look), numbers, page),
        "upgraded": Subject(place / "upgraded", (generate,), numbers),
        "gpt2": Subject(place / "gpt2", (("upgrade", "FOLDER", "--out", "OUT", "--rank", "2"),), ("--rank", "--seed")),
        "vision": Subject(place / "vision", (picture,), ("--batch", "--threads", "--validation"), scores),
        "forecast": Subject(place / "forecast", (predict,), ("--start", "--missing-below"), forecast_of),
        "series": Subject(place / "series", (read,), (), forecast_of),
        "run": Subject(place / "run", (generate, resume), ()),
        "stopped": Subject(place / "stopped", (resume,), (), without_speed),
        "data": Subject(
            place / "data", ((*TRAIN, "--shards", "FOLDER", "--out", "OUT"),), trains, without_speed
        ),
        "store": Subject(
            place / "store", (("forecast", "table", "--results", "FOLDER", "--out", "OUT"),), (), forecast_of
        ),
        "evaluated": Subject(place / "evaluated", (("lm", "table", "FOLDER", "--out", "OUT"),)),
        "recipe": Subject(
            place / "recipe",
            (("lm", "train", *SIZES, "--recipe", "FOLDER/own.yaml", "--shards", str(place / "data"), "--out", "OUT",
              "--sample-tokens", "0", "--validation-tokens", "32", "--threads", "1", "--steps", "2"),),
            (),
            without_speed,
        ),
    }  # fmt: skip


def by_hand() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one subject")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        subjects = make(Path(folder))
        subjects = {name: one for name, one in subjects.items() if given.only in (None, name)}
        trial = Trial(subjects, Path(folder) / "trial")
        for number, case in enumerate(cases(subjects, given.cases, given.seed)):
            problem = trial.run(case)
            if problem is not None:
                failures += 1
                print(f"--- {number} {case.subject} {case.command[0]} {case.told}\n{problem}", flush=True)
    print(f"{failures} of {given.cases} cases failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(by_hand())
