"""`femixer lm reach`: the loss of trained models by position, also beyond the training length, and what they recall.

A token is a repeat if the `repeat` tokens before it stand earlier in the same sequence and document, followed by that
same token where they stood last: who remembers the text can tell it.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from femixer.damage import check_numbers
from femixer.models import preset
from femixer.options import check, parse
from femixer.reporting import Column, Group, Row, Score, Table, as_markdown, marked_columns, write
from femixer.reporting.figures import GREY, banded, figure, looks, plain_log, quiet, save
from femixer.tasks.lm.checkpoint import check_positions, load
from femixer.tasks.lm.data import DataOptions
from femixer.tasks.lm.data.shards import IGNORED, Batch, Shards, Validation
from femixer.tasks.lm.fit import documents
from femixer.tasks.lm.records import Run, comparison, runs_of
from femixer.training import atomic
from femixer.training.results import Record, check_no_run

RECORDS, FIGURE = "reach.json", "reach.png"


@dataclass(frozen=True)
class Reach:
    """The loss by position up to several times the training length, and that of repeated tokens, on held-out text.

    Writes table.md, which it prints, table.tex, table.csv, reach.png and reach.json.
    """

    results: tuple[Path, ...]
    """Results folders of `femixer lm compare`."""
    data: DataOptions = field(default_factory=DataOptions)
    times: int = 4
    """Length of a sequence, in training lengths."""
    repeat: int = 8
    """Preceding tokens that must recur for the next token to count as a repeat; 8 suits bytes."""
    tokens: int | None = 65536
    """Tokens of the held-out text to read (rounded up to whole sequences); None reads all."""
    out: Path = Path("results/lm-reach")
    """Folder of the files."""

    def validate(self) -> None:
        for name in ("times", "repeat"):
            check(getattr(self, name) > 0, name, getattr(self, name), "a whole number above 0")
        check(self.tokens is None or self.tokens > 0, "tokens", self.tokens, "a whole number above 0, or None")


def main(args: Sequence[str]) -> int:
    command = parse(Reach, args, "lm reach")
    command.validate()
    check_no_run(command.out)
    shards = command.data.tokens()
    runs = [run for path in command.results for run in runs_on(shards, path)]
    contexts = sorted({context_of(run) for run in runs})
    check(len(contexts) == 1, "results", contexts, "runs of one training length")
    named = [f"{run.model}, seed {run.seed}" for run in runs]
    twice = [each for each in named if named.count(each) > 1]
    check(not twice, "results", twice[:1], "folders in which each model has each seed once")
    most = (shards.validation.tokens - 1) // contexts[0]
    check(command.times <= most, "times", command.times, f"at most {most}: there is no more held-out text")
    measurement = Measurement(shards, contexts[0], command)
    records = []
    for number, run in enumerate(runs, 1):
        records.append({"model": run.model, "seed": run.seed, **measurement.scores(run.folder)})
        print(f"{number}/{len(runs)} {run.model}, seed {run.seed}", file=sys.stderr, flush=True)
    table = tabulate(records, measurement)
    with atomic.replacing_files(command.out) as new:
        save(draw(records, measurement), new / FIGURE)
        atomic.write(new / RECORDS, json.dumps(records, indent=1) + "\n")
        write(new, [table])
    print(as_markdown(table))
    print(f"The table is in {command.out}/ as Markdown, LaTeX and CSV, the figure is {command.out / FIGURE}")
    return 0


def runs_on(shards: Shards, folder: Path) -> list[Run]:
    """The finished runs of a comparison, of this text: what is held out of another one may be what they learned."""
    same = comparison(folder)["experiment"].get("text") == shards.fingerprint
    check(same, "results", str(folder), f"runs on the text of --data and --tokenizer ({shards.fingerprint})")
    runs = runs_of(folder)
    check(len(runs) > 0, "results", str(folder), "a comparison with a finished run")
    return runs


def context_of(run: Run) -> int:
    """Tokens of a training sequence."""
    return int(run.experiment["context"] or preset(run.experiment["model"]["preset"]).max_position_embeddings)


class Text:
    """Held-out text in sequences of one length: where each scored token stands, and which are repeats."""

    def __init__(self, shards: Shards, length: int, command: Reach) -> None:
        windows = None if command.tokens is None else -(-command.tokens // length)
        self.batches = [*Validation(shards, length, 1, windows).batches()]
        places = [places_of(batch, command.repeat) for batch in self.batches]
        self.position = np.concatenate([position for position, _ in places])
        self.is_repeat = np.concatenate([repeats for _, repeats in places])

    def losses(self, model: Any) -> NDArray[np.float64]:
        return np.concatenate([losses(model, batch) for batch in self.batches])


class Measurement:
    """Of one training length: the text in sequences as long as that, for repeats, and several times as long."""

    def __init__(self, shards: Shards, context: int, command: Reach) -> None:
        self.context, self.times, self.repeat = context, command.times, command.repeat
        self.near, self.far = Text(shards, context, command), Text(shards, context * command.times, command)
        self.bounds = bounds(context, context * command.times)

    def scores(self, run: Path) -> Record:
        """Mean nats per token of a model: by stretch of positions, of repeats and of all other tokens."""
        model, _ = load(run)
        check_positions(model, self.context * self.times, "times", self.times)
        near, far = self.near.losses(model), self.far.losses(model)
        stretch = np.searchsorted(self.bounds, self.far.position, side="right") - 1
        found = {
            "bounds": self.bounds,
            "by_position": [mean(far[stretch == n]) for n in range(len(self.bounds) - 1)],
            "repeats": mean(near[self.near.is_repeat]),
            "others": mean(near[~self.near.is_repeat]),
        }
        check_numbers(found, f"the losses of {run.name}")
        return found


def bounds(context: int, length: int) -> list[int]:
    """Of stretches of positions, most of them twice as long as the one before; one begins at the training length."""
    shorter = (context >> n for n in (3, 2, 1))
    longer = (context << n for n in range((length // context).bit_length()))
    return sorted({0, *shorter, *(bound for bound in longer if bound < length), length})


def places_of(batch: Batch, repeat: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Of each scored token of a batch of one sequence: how many tokens of its document the model has seen before, and
    whether it is a repeat."""
    ids, targets, segments = (x[0].tolist() for x in batch)
    position: list[int] = []
    repeats: list[bool] = []
    begin, known = 0, dict[tuple[int, ...], int]()
    for t, target in enumerate(targets):
        if t and segments[t] != segments[t - 1]:
            begin, known = t, {}
        if target == IGNORED:
            continue
        before = tuple(ids[max(begin, t + 1 - repeat) : t + 1])
        position.append(t - begin)
        repeats.append(len(before) == repeat and known.get(before) == target)
        known[before] = target
    return np.array(position, dtype=np.int64), np.array(repeats, dtype=np.bool_)


@torch.no_grad()
def losses(model: Any, batch: Batch) -> NDArray[np.float64]:
    """-log p of each scored token of a batch, in nats."""
    inputs, targets, segments = (x.to(model.device) for x in batch)
    logits = model(inputs, segments=documents(segments), use_cache=False).logits
    nats = F.cross_entropy(logits[0].double(), targets[0], ignore_index=IGNORED, reduction="none")
    return nats[targets[0] != IGNORED].cpu().numpy()


def mean(nats: NDArray[np.float64]) -> float | None:
    """None where no token is of this kind: documents may be shorter than the sequences."""
    return float(nats.mean()) if nats.size else None


def by_model(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record["model"]].append(record)
    return found


def tabulate(records: Sequence[Record], by: Measurement) -> Table:
    """Means over the seeds; the lowest of each column in bold."""
    stretches = [f"{low} to {high - 1}" for low, high in pairwise(by.bounds)]
    columns = [Column("model"), *(Column(name, scores=True) for name in (*stretches, "repeats", "others"))]
    models = by_model(records)
    cells = [[Score(*each).cell(3, spread="deviation") for each in numbers(runs)] for runs in models.values()]
    marked = marked_columns(cells, [False] * (len(columns) - 1))
    rows: list[Row] = [[name, *row] for name, row in zip(models, marked, strict=True)]
    repeats = by.near.is_repeat
    note = (
        f"Nats per token of held-out text, by the number of tokens read before, in sequences of {by.times} times the "
        f"training length of {by.context}; repeats ({repeats.sum():,}) and others ({(~repeats).sum():,}) in sequences "
        f"of the training length. A repeat follows {by.repeat} tokens that stand earlier in its sequence, followed by "
        "that token. Mean ± standard deviation over seeds."
    )
    return Table(columns, [Group(rows)], notes=[note])


def numbers(runs: Sequence[Record]) -> Iterator[tuple[dict[int, float], int]]:
    """Of each column: the losses by seed, where there are any, and how many there should be."""
    columns = zip(*([*run["by_position"], run["repeats"], run["others"]] for run in runs), strict=True)
    for column in columns:
        found = {run["seed"]: value for run, value in zip(runs, column, strict=True) if value is not None}
        yield found, len(runs)


def draw(records: Sequence[Record], by: Measurement) -> Any:
    """Loss by position, with bands of one standard deviation over the seeds."""
    drawing = figure(8.5, 4.6)
    axes = drawing.subplots()
    middles = np.sqrt(np.maximum(by.bounds[:-1], 1) * np.array(by.bounds[1:], dtype=float))
    models = by_model(records)
    for name, look in looks([*models]).items():
        values = np.array([record["by_position"] for record in models[name]], dtype=float)
        banded(axes, middles, values, {**look, "markersize": 4})
    axes.axvline(by.context, color=GREY, linestyle=":", label="training length")
    axes.set(xlabel="tokens read before", ylabel="loss (nats per token)", xscale="log")
    plain_log(axes.xaxis)
    quiet(axes)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return drawing
