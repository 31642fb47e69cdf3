"""A checkpoint under lm-evaluation-harness: one task at a time."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from femixer.optional import require
from femixer.options import check

Record = dict[str, Any]


def language_model(model: Any, tokenizer: Any, batch_size: int, max_length: int | None) -> Any:
    """The model as the harness wants it. Log-probabilities are computed in float32, whatever the model's precision."""
    check(
        tokenizer.eos_token_id is not None,
        "tokenizer",
        type(tokenizer).__name__,
        "one with a token for the end of text",
    )
    harness = require("lm_eval.models.huggingface", "eval")
    logger = logging.getLogger("lm_eval")
    logger.setLevel(logging.ERROR)  # it warns that a loaded model takes no options, of which we give none
    wrapped = harness.HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_length=max_length,
        softmax_dtype="float32",
    )
    logger.setLevel(logging.WARNING)
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
    _check_length(lm, name, task)
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
    better: dict[str, bool] = {}
    for record in records.values():
        better.update(record["higher_is_better"])
    return {
        "shots": shots.pop() if len(shots) == 1 else None,
        "samples": sum(record["samples"] for record in records.values()),
        "version": group.version,
        "raw": raw,
        "higher_is_better": better,
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


def _check_length(lm: Any, name: str, task: Any) -> None:
    """The harness would stop at an assertion, halfway."""
    if task.get_config("output_type") != "generate_until":
        return
    new = int((task.get_config("generation_kwargs") or {}).get("max_gen_toks", lm.max_gen_toks))
    if new >= lm.max_length:
        raise ValueError(
            f"max_length={lm.max_length} is not allowed; choose more than {new}: {name} lets the model write that many "
            f"tokens"
        )
