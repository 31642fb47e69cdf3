"""`femixer vision table`: results of `femixer vision run`, beside the paper's where there are any.

A job is a model trained with one seed; its scores are those on the test part, of the best weights by validation. Where
jobs differ in learning rate or weight decay as well, the pair with the highest validation accuracy, as the mean over
seeds, counts; a pair that has fewer seeds than another does not.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from femixer.reporting import Cell, Column, Group, Row, Score, Table, marked_columns
from femixer.tasks.runner import note_of_priors, over_seeds, usual_notes
from femixer.training.results import Record
from femixer.training.store import as_text, besides, best, distinct, same, setting

TOP1 = {
    "deit-tiny": {"SMAttn": 72.20, "TNN": 72.29, "HGRN": 74.40, "HGRN2": 75.39, "FEM-SM": 76.70, "FEM-GLA": 75.80},
    "deit-small": {"SMAttn": 79.90, "TNN": 79.20, "HGRN": 80.09, "HGRN2": 80.12, "FEM-SM": 80.45, "FEM-GLA": 80.20},
}
"""preset -> model -> top-1 accuracy in percent; SMAttn is DeiT itself."""
CLASSES = 1000


TUNED = ("lr", "weight_decay")


@dataclass(frozen=True)
class Compared:
    """Results that may be compared."""

    dataset: str
    preset: str
    classes: int
    seeds: tuple[int, ...]
    chosen: dict[str, list[Record]]
    """model -> the records that count, one per seed."""

    def score(self, model: str, metric: str) -> Score:
        scores = {record["seed"]: record[metric] for record in self.chosen[model]}
        return Score(scores, len(self.seeds), len(scores), len(self.seeds))


def groups(records: Sequence[Record]) -> list[Compared]:
    """In the order of their first records, each job once; an error if they are not of one experiment."""

    def training(record: Record) -> str:
        return as_text([besides(record, TUNED), record["augmentation"], record["eval_crop"]])

    def made(record: Record) -> str:
        return as_text([record["fields"], record["parameter_count"]])

    same(records, "images of one name", lambda record: record["fingerprint"], "dataset")
    same(records, "ways of training", training, "dataset", "preset")
    same(records, "models of one name", made, "model", "dataset", "preset")
    held: dict[tuple[str, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in distinct(records, lambda record: record["top1"], ("model", "dataset", "preset", "seed", "training")):
        held[record["dataset"], record["preset"]][record["model"]].append(record)
    found = []
    for place, models in held.items():
        every = [record for own in models.values() for record in own]
        seeds = tuple(sorted({record["seed"] for record in every}))
        chosen = {model: best(own, TUNED, lambda record: -record["validation_top1"]) for model, own in models.items()}
        found.append(Compared(*place, every[0]["classes"], seeds, chosen))
    return found


ORDER = ("SMAttn", "FEM-SM", "GLA", "FEM-GLA")
"""Rows from top to bottom; models that are not among them follow."""
METRICS = {"top1": "Top-1 (%)", "top5": "Top-5 (%)", "loss": "Loss"}


def tabulate(records: Sequence[Record]) -> list[Table]:
    """A table for each group of results that may be compared."""
    found = groups(records)
    tables = [grouped(group) for group in found]
    notes = legend(records, tables)
    return [*tables[:-1], replace(tables[-1], notes=notes)]


def grouped(group: Compared) -> Table:
    title = f"{group.dataset}, {group.preset}"
    models = [*(m for m in ORDER if m in group.chosen), *(m for m in group.chosen if m not in ORDER)]
    cells = marked_columns([scores(group, model) for model in models], [metric != "loss" for metric in METRICS])
    rows: list[Row] = []
    for model, own in zip(models, cells, strict=True):
        records = group.chosen[model]
        seconds = statistics.mean(record["seconds"] for record in records)
        rows.append([model, title, f"{records[0]['parameter_count']:,}", *own, f"{seconds:,.0f}"])
    columns = (
        Column(title, key="model"),
        Column("data", hidden=True),
        Column("Parameters", align="right"),
        *(Column(heading, key=metric, scores=True) for metric, heading in METRICS.items()),
        Column("Seconds", align="right"),
    )
    return Table(columns, [Group(rows)], stacked=True, melted=("metric", "value"))


def scores(group: Compared, model: str) -> list[Cell]:
    # The paper's accuracy, if the images are ImageNet's.
    imagenet = "imagenet" in group.dataset.lower().replace("-", "") and group.classes == CLASSES
    paper = TOP1.get(group.preset, {}).get(model) if imagenet else None
    printed = {"top1": "" if paper is None else f"{paper:.2f}"}
    digits = {"loss": (4, 1)}
    return [group.score(model, m).cell(*digits.get(m, (2, 100)), printed.get(m, "")) for m in METRICS]


def legend(records: Sequence[Record], tables: Sequence[Table]) -> list[str]:
    """What a reader must know."""
    text = [
        f"On the test part, once, at the best validation accuracy; {over_seeds(records)}. The best of a column is bold."
    ]
    if any(isinstance(each, Cell) and each.paper for table in tables for row in table.rows for each in row):
        text.append(f"In parentheses: the paper's top-1 accuracy for {' and '.join(TOP1)}.")
    text += usual_notes(records, (row for table in tables for row in table.rows))
    for table in tables:
        counts = [int(str(row[2]).replace(",", "")) for row in table.rows]
        if len(counts) > 1:
            text.append(f"Parameters of {table.header[0]} differ by {max(counts) / min(counts) - 1:.1%} at most.")
    pairs = {(record["model"], record["dataset"], record["preset"], setting(record, TUNED)) for record in records}
    if len(pairs) > len({each[:3] for each in pairs}):
        text.append("Learning rates and weight decays are those of the highest validation accuracy.")
    broken = max(record["broken"] for record in records)
    if broken:
        text.append(f"Up to {broken} images could not be read and were skipped.")
    return text + note_of_priors({record["model"] for record in records})
