"""lm-evaluation-harness: its tasks by name, local ones from YAML files, and a checkpoint evaluated on one of them."""

import difflib
import logging
import random
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from femixer.optional import require
from femixer.options import check

EXAMPLES = Path(__file__).parent / "examples"
"""Tasks that come with femixer; they need no download."""


@dataclass(frozen=True)
class Request:
    """A task or group to evaluate; shots: None for the task's own."""

    name: str
    shots: int | None = None


class Catalog:
    """Finds tasks by name and loads them, which is when their data is read or downloaded."""

    def __init__(self, folders: Sequence[Path], names: Iterable[str]) -> None:
        """`folders` are searched for YAML files, besides the examples; the harness' own tasks only if one of `names`
        is not found there, since reading their 14,000 files takes seconds."""
        for folder in folders:
            check(folder.is_dir(), "include_path", str(folder), "an existing folder with YAML files of tasks")
        manager = require("lm_eval.tasks", "eval").TaskManager
        local = [str(folder.resolve()) for folder in (EXAMPLES, *folders)]
        with _quiet():
            self.manager = manager(include_path=local, include_defaults=False)
            if not all(name in self.manager.task_index for name in names):
                self.manager = manager(include_path=local)
        _find_data_beside_yaml(self.manager)

    def requests(self, shots: Mapping[str, int | None]) -> list[Request]:
        """Name -> shots as requests, with a tag replaced by its tasks. Unknown names are an error."""
        requests: dict[str, Request] = {}
        for name, number in shots.items():
            entry = self.manager.task_index.get(name)
            if entry is None:
                near = difflib.get_close_matches(name, self.manager.all_tasks, n=3)
                hint = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists the harness' own"
                raise ValueError(f"tasks={name!r} is unknown; {hint}")
            members = sorted(entry.tags) if name in self.manager.all_tags else [name]
            requests.update({member: Request(member, number) for member in members})
        return list(requests.values())

    def load(self, request: Request) -> tuple[dict[str, Any], Any | None]:
        """The tasks of a request by name, ready to evaluate, and the group that they form (None for a single task)."""
        with _quiet():
            loaded = self.manager.load([request.name])
        for task in loaded["tasks"].values():
            if request.shots is not None:
                task.set_config(key="num_fewshot", value=request.shots)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234)  # the harness' own default
        return loaded["tasks"], loaded["groups"].get(request.name)


def _find_data_beside_yaml(manager: Any) -> None:
    """Let `data_files` of a task name files beside its YAML file; the harness looks in the working directory only."""
    factory = manager._factory
    original = factory._load_full_config

    def located(entry: Any, overrides: Any = None) -> dict[str, Any]:
        config = original(entry, overrides)
        options = config.get("dataset_kwargs")
        if entry.yaml_path and isinstance(options, dict) and "data_files" in options:
            files = _located(options["data_files"], Path(entry.yaml_path).parent)
            config["dataset_kwargs"] = {**options, "data_files": files}
        return config

    factory._load_full_config = located


def _located(files: Any, folder: Path) -> Any:
    """`files` (a name, or a list or mapping of names) with those that exist in `folder` given in full."""
    if isinstance(files, dict):
        return {split: _located(names, folder) for split, names in files.items()}
    if isinstance(files, list):
        return [_located(name, folder) for name in files]
    return str(folder / files) if (folder / files).exists() else files


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, the harness does not warn: it would of every task that it finds twice, and a local one is meant to
    replace the harness' own."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


Record = dict[str, Any]


def language_model(model: Any, tokenizer: Any, batch_size: int, max_length: int | None) -> Any:
    """The model as the harness wants it. Log-probabilities are computed in float32, whatever the model's precision."""
    ends = tokenizer.eos_token_id is not None
    check(ends, "tokenizer", type(tokenizer).__name__, "one with a token for the end of text")
    harness = require("lm_eval.models.huggingface", "eval")
    with _quiet():  # it warns that a loaded model takes no options, of which we give none
        wrapped = harness.HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
            softmax_dtype="float32",
        )
    for handler in (logging.lastResort, *logging.getLogger().handlers):
        if handler is not None and not any(isinstance(item, OncePerPlace) for item in handler.filters):
            handler.addFilter(OncePerPlace())
    return wrapped


@contextmanager
def bars(wanted: bool) -> Iterator[None]:
    """The harness and its packages draw progress bars, and have no common way to be told not to (in a file)."""
    tqdm = require("tqdm", "eval").tqdm
    original = tqdm.__init__
    if not wanted:
        tqdm.__init__ = lambda self, *args, **options: original(self, *args, **{**options, "disable": True})
    try:
        yield
    finally:
        tqdm.__init__ = original


class OncePerPlace(logging.Filter):
    """Lets one warning through per line of the harness: it repeats one about long prompts for every prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        if not record.name.startswith("lm_eval") or place not in self.seen:
            self.seen.add(place)
            return True
        return False


def evaluate(lm: Any, name: str, task: Any, limit: float | None) -> Record:
    """Evaluate one task: its metrics with their standard errors, its shots, and how many samples there were."""
    if task.get_config("output_type") == "generate_until":  # the harness would stop at an assertion, halfway
        new = int((task.get_config("generation_kwargs") or {}).get("max_gen_toks", lm.max_gen_toks))
        more = f"more than {new}: {name} lets the model write that many tokens"
        check(new < lm.max_length, "max_length", lm.max_length, more)
    # the seeds that the harness' own command line sets
    random.seed(0)
    np.random.seed(1234)  # noqa: NPY002 - what the tasks draw from
    torch.manual_seed(1234)
    results = require("lm_eval.evaluator", "eval").evaluate(
        lm, {"tasks": {name: task}}, limit=limit, log_samples=False, bootstrap_iters=1000
    )
    return {
        "shots": results["n-shot"][name],
        "samples": results["n-samples"][name]["effective"],
        "version": results["versions"][name],
        "raw": results["results"][name],
        "higher_is_better": results["higher_is_better"][name],
    }


def aggregate(group: Any, records: dict[str, Record]) -> Record:
    """The group's own metrics from those of its tasks, as the harness defines them for this group."""
    raw = group.aggregate({name: record["raw"] for name, record in records.items()})
    shots = {record["shots"] for record in records.values()}
    return {
        "shots": shots.pop() if len(shots) == 1 else None,
        "samples": sum(record["samples"] for record in records.values()),
        "version": group.version,
        "raw": raw,
        "higher_is_better": dict(ChainMap(*(record["higher_is_better"] for record in reversed(records.values())))),
    }


def metrics(record: Record) -> dict[str, Record]:
    """`{"acc,none": 0.5, "acc_stderr,none": 0.1}` as `{"acc": {"value": 0.5, "stderr": 0.1, ...}}`.

    A filter other than none, which is what the harness calls a way to read an answer, stays part of the name.
    """
    found = {}
    for key, value in record["raw"].items():
        name, comma, filtered = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        stderr = record["raw"].get(f"{name}_stderr,{filtered}")
        found[name if filtered == "none" else key] = {
            "value": float(value),
            "stderr": float(stderr) if isinstance(stderr, (int, float)) else None,
            "higher_is_better": record["higher_is_better"].get(name),
        }
    return found


@dataclass(frozen=True)
class PaperColumn:
    """One column of the paper's table: `metric` of `task`, evaluated with `shots` examples before the question.

    Names are the harness' own. It has the Open LLM Leaderboard as `leaderboard_*`: groups of several tasks, except for
    MMLU-Pro and IFEval.
    """

    title: str
    measure: str  # what the table's head calls the metric
    task: str
    metric: str
    shots: int = 0


LEADERBOARD = (
    PaperColumn("MMLU-P", "Acc", "leaderboard_mmlu_pro", "acc", shots=5),
    PaperColumn("GPQA", "Acc_n", "leaderboard_gpqa", "acc_norm"),
    PaperColumn("BBH", "Acc_n", "leaderboard_bbh", "acc_norm", shots=3),
    PaperColumn("MATH", "EM", "leaderboard_math_hard", "exact_match", shots=4),
    PaperColumn("MuSR", "Acc_n", "leaderboard_musr", "acc_norm"),
    PaperColumn("IFE-I", "strict", "leaderboard_ifeval", "inst_level_strict_acc"),
    PaperColumn("IFE-P", "strict", "leaderboard_ifeval", "prompt_level_strict_acc"),
)
GENERAL = (
    PaperColumn("ARC-C", "Acc_n", "arc_challenge", "acc_norm"),
    PaperColumn("ARC-E", "Acc_n", "arc_easy", "acc_norm"),
    PaperColumn("HS", "Acc_n", "hellaswag", "acc_norm"),
    PaperColumn("PIQA", "Acc_n", "piqa", "acc_norm"),
    PaperColumn("BoolQ", "Acc", "boolq", "acc"),
    PaperColumn("WinoG", "Acc", "winogrande", "acc"),
    PaperColumn("COPA", "Acc", "copa", "acc"),
    PaperColumn("OBQA", "Acc_n", "openbookqa", "acc_norm"),
    PaperColumn("SciQ", "Acc_n", "sciq", "acc_norm"),
)
BLOCKS = {"Open LLM Leaderboard": LEADERBOARD, "General Ability": GENERAL}
COLUMNS = (*LEADERBOARD, *GENERAL)

SUITES: dict[str, dict[str, int]] = {"paper": {column.task: column.shots for column in (*GENERAL, *LEADERBOARD)}}
"""Name of a suite -> tasks, the quick ones first, and their shots."""
