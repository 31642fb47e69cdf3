"""The finished runs of `femixer lm compare`, as records, and what they show.

`femixer lm curves` draws their learning curves, with bands over the seeds, from folders or exported files. `femixer lm
reach` has the loss of the trained models by position, also beyond the training length, and what they recall: a token is
a repeat if the `repeat` tokens before it stand earlier in the same sequence and document, followed by that same token
where they stood last: who remembers the text can tell it.
"""

import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from femixer.damage import check_fields, check_numbers, read_json
from femixer.models import preset
from femixer.options import Count, check, parse
from femixer.reporting import Column, Group, Row, Score, Table, marked_columns
from femixer.reporting.figures import GREY, banded, figure, looks, plain_log, quiet
from femixer.tasks.lm import TASK
from femixer.tasks.lm import model as models
from femixer.tasks.lm.data import DataOptions
from femixer.tasks.lm.data.shards import IGNORED, Batch, Shards, Validation
from femixer.tasks.lm.fit import documents, recorded
from femixer.tasks.runner import Tabulate, report
from femixer.training import atomic, store
from femixer.training.results import CONFIG, TABLE, Record, check_no_run
from femixer.training.store import INDEX, RUNS

PLACE = {"fingerprint": None, "run": None}
"""What files that were exported earlier do not tell of the same run."""


def load(*given: str | os.PathLike[str]) -> list[Record]:
    """The records of comparisons (folders) and of exported files, each once."""
    found: list[Record] = []
    for path in map(Path, given):
        old = (path / RUNS).is_dir() and not (path / INDEX).exists()
        found += earlier(path) if old else store.load(path, TASK.kind)
    return [*{json.dumps({**record, **PLACE}, sort_keys=True): record for record in found}.values()]


def earlier(folder: Path) -> list[Record]:
    """Of a comparison from before it was a store: its finished runs, named `MODEL-seed-N`, or with spaces."""
    config = check_fields(read_json(folder / CONFIG), {"experiment": {"experiment": dict}, "text": str}, folder)
    runs = [path.parent for path in sorted((folder / RUNS).glob(f"*/{TABLE}"))]
    names = {run: re.split(r"[ -]seed[ -]", run.name)[0] for run in runs}
    return [recorded(run, name, config["text"], config["experiment"]["experiment"]) for run, name in names.items()]


@dataclass(frozen=True)
class Curves(Tabulate):
    """Validation loss of recorded comparisons, by model and text: learning curves, and how they ended.

    Writes table.md, which it prints, table.tex, table.csv and curves.png. Means and standard deviations over the seeds.
    """

    results: tuple[Path, ...]
    """Results folders of `femixer lm compare`, finished or not, or files of `femixer lm export`."""
    models: tuple[str, ...] = ()
    """Only these, in this order, by the names that the table has; otherwise all."""
    out: Path = Path("results/lm-curves")
    """Folder of the files."""

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return [curves_table(by_text(chosen(records, self.models)))]

    def figures(self, records: Sequence[Record]) -> dict[str, Any]:
        return {"curves.png": draw_curves(by_text(chosen(records, self.models)))}


def chosen(records: Sequence[Record], models: Sequence[str]) -> Sequence[Record]:
    known = [*dict.fromkeys(record["model"] for record in records)]
    for model in models:
        check(model in known, "models", model, f"some of {'; '.join(known)}")
        check(models.count(model) == 1, "models", model, "different ones")
    return [record for model in models or known for record in records if record["model"] == model]


def titled(record: Record) -> str:
    return f"{record['model']}, seed {record['seed']}"


Runs = dict[str, dict[str, dict[int, Record]]]
"""Text -> model -> seed -> its record."""


def by_text(records: Sequence[Record]) -> Runs:
    """Of one length of training: runs of another one cannot be compared by their ends."""
    found: Runs = defaultdict(lambda: defaultdict(dict))
    for record in records:
        named = f"{titled(record)} on {record['text']}"
        check(len(record["curve"]) > 1, "results", named, "runs that were evaluated after their start")
        steps = [step for step, _ in record["curve"]]
        known = found[record["text"]][record["model"]]
        first = next(iter(next(iter(found[record["text"]].values())).values()), record)
        same = steps == [step for step, _ in first["curve"]] and record["experiment"] == first["experiment"]
        check(same, "results", named, f"runs of one experiment on a text: it is another than that of {first['model']}")
        check(record["seed"] not in known, "results", named, "each run once")
        known[record["seed"]] = record
    return found


def curves_table(runs: Runs) -> Table:
    """Models by texts, the best in bold. A model lacks seeds where another one of the text has more."""
    models = [*dict.fromkeys(model for by_model in runs.values() for model in by_model)]
    cells = []
    for model in models:
        held = [(by_model.get(model, {}), len({*chain(*by_model.values())})) for by_model in runs.values()]
        scores = [Score({seed: run["loss"] for seed, run in by_seed.items()}, all_) for by_seed, all_ in held]
        cells.append([score.cell(4, spread="deviation") for score in scores])
    rows: list[Row] = [[model, *row] for model, row in zip(models, marked_columns(cells, higher=False), strict=True)]
    note = (
        "Validation loss in nats per token, mean ± standard deviation over the seeds; in bold the best with all seeds."
    )
    return Table.of(("model", *runs), rows, note)


MOST_INSIDE = 8
"""Models that a panel has room to name; more would cover its curves."""


def draw_curves(runs: Runs) -> Any:
    """A panel per text; the first evaluation, of untrained models, is left out."""
    drawing = figure(1.5 + 4.5 * len(runs), 4.4)
    styles = looks([*dict.fromkeys(model for by_model in runs.values() for model in by_model)])
    panels = drawing.subplots(1, len(runs), squeeze=False)[0]
    for axes, (text, by_model) in zip(panels, runs.items(), strict=True):
        for model, by_seed in by_model.items():
            curves = np.array([record["curve"][1:] for record in by_seed.values()], dtype=float)
            banded(axes, curves[0, :, 0], curves[:, :, 1], {**styles[model], "marker": ""})
        axes.set(xlabel="steps", ylabel="validation loss (nats per token)", yscale="log", title=text)
        plain_log(axes.yaxis, (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
        quiet(axes)
    if len(styles) > MOST_INSIDE:
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        drawing.legend(handles=[*lines.values()], loc="outside right upper", frameon=False, fontsize=8)
    else:
        for axes in panels:
            axes.legend(frameon=False, fontsize=8)
    return drawing


@dataclass(frozen=True)
class Reach:
    """The loss by position up to several times the training length, and that of repeated tokens, on held-out text.

    Writes table.md, which it prints, table.tex, table.csv, reach.png and reach.json.
    """

    results: tuple[Path, ...]
    """Results folders of `femixer lm compare`."""
    data: DataOptions = field(default_factory=DataOptions)
    times: Count = 4
    """Length of a sequence, in training lengths."""
    repeat: Count = 8
    """Preceding tokens that must recur for the next token to count as a repeat; 8 suits bytes."""
    tokens: Count | None = 65536
    """Tokens of the held-out text to read (rounded up to whole sequences); None reads all."""
    out: Path = Path("results/lm-reach")
    """Folder of the files."""


def reach(args: Sequence[str]) -> int:
    command = parse(Reach, args, "lm reach")
    check_no_run(command.out)
    shards = command.data.tokens()
    runs = [run for path in command.results for run in runs_on(shards, path)]
    trained = ((record["experiment"]["context"], record["fields"]["preset"]) for _, record in runs)
    contexts = sorted({int(length or preset(size).max_position_embeddings) for length, size in trained})
    check(len(contexts) == 1, "results", contexts, "runs of one training length")
    (named, times), *_ = Counter(titled(record) for _, record in runs).most_common(1)
    check(times == 1, "results", [named], "folders in which each model has each seed once")
    most = (shards.validation.tokens - 1) // contexts[0]
    check(command.times <= most, "times", command.times, f"at most {most}: there is no more held-out text")
    measurement = Measurement(shards, contexts[0], command)
    records = []
    for number, (folder, record) in enumerate(runs, 1):
        records.append({"model": record["model"], "seed": record["seed"], **measurement.scores(folder)})
        print(f"{number}/{len(runs)} {titled(record)}", file=sys.stderr, flush=True)
    report(command.out, [reach_table(records, measurement)], {"reach.png": draw_reach(records, measurement)})
    atomic.write(command.out / "reach.json", json.dumps(records, indent=1) + "\n")
    return 0


def runs_on(shards: Shards, folder: Path) -> list[tuple[Path, Record]]:
    """The finished runs of a comparison, of this text: what is held out of another one may be what they learned."""
    check((folder / RUNS).is_dir(), "results", str(folder), "a results folder of `femixer lm compare` with a run")
    records = load(folder)
    same = all(record["fingerprint"] == shards.fingerprint for record in records)
    check(same, "results", str(folder), f"runs on the text of --data and --tokenizer ({shards.fingerprint})")
    return [(folder / RUNS / record["run"], record) for record in records]


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
        model, _ = models.load(run)
        models.check_positions(model, self.context * self.times, "times", self.times)
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


def reach_table(records: Sequence[Record], by: Measurement) -> Table:
    """Means over the seeds; the lowest of each column in bold."""
    stretches = [f"{low} to {high - 1}" for low, high in pairwise(by.bounds)]
    columns = [Column("model"), *(Column(name, scores=True) for name in (*stretches, "repeats", "others"))]
    models, cells = by_model(records), []
    for runs in models.values():
        values = zip(*([*run["by_position"], run["repeats"], run["others"]] for run in runs), strict=True)
        losses = [{r["seed"]: x for r, x in zip(runs, each, strict=True) if x is not None} for each in values]
        cells.append([Score(by_seed, len(runs)).cell(3, spread="deviation") for by_seed in losses])
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


def draw_reach(records: Sequence[Record], by: Measurement) -> Any:
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
