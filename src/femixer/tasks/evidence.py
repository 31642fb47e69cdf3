"""`femixer evidence`: what FEM gains over its own prior, as paired differences over everything that was recorded.

A pair is FEM and the same prior read by its mean, or any two models, with the same data, size and seed. What a seed or
a data set does to both cancels in their difference.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from femixer.models.named import NAMED
from femixer.options import check, check_different, parse
from femixer.reporting import Cell, Column, Group, Row, Score, Table, difference
from femixer.reporting.table import Difference
from femixer.tasks.runner import report
from femixer.training.results import Record, check_no_run
from femixer.training.store import as_text

PAIRS = (("FEM-SM", "SMAttn"), ("FEM-GLA", "GLA"), ("FEM-AFT", "AFT"), ("FEM-Mamba", "Mamba"))
"""FEM with all parts, and its prior with the mean as read."""
Pair = tuple[str, str]
FEWEST = 3
"""Pairs from which on an interval is taken seriously."""


def is_fem(model: str) -> bool:
    """Whether it has the options of a mixer that a setting may name; other models have their default ones."""
    return model.startswith("FEM-")


class Measured(NamedTuple):
    """Scores of one model in one setting."""

    setting: str
    model: str
    score: Score
    counted: bool = True
    """In the row of all settings; not where another setting has the same runs of the priors."""


def of_mad(records: Sequence[Record]) -> Iterator[Measured]:
    from femixer.tasks.mad.table import rows

    for model, row in rows(records).items():
        yield from (Measured(task, model, score) for task, score in row.items())


def of_vision(records: Sequence[Record]) -> Iterator[Measured]:
    from femixer.tasks.vision.table import groups

    for group in groups(records):
        yield from (Measured(group.dataset, model, group.score(model, "top1")) for model in group.chosen)


def of_forecast(records: Sequence[Record]) -> Iterator[Measured]:
    from femixer.tasks.forecast.table import TUNED, groups

    for group in groups(records, (*TUNED, "epochs", "patience")):
        for model, horizon in group.chosen:
            rows = "" if group.lookback is None else f" from {group.lookback} rows"
            yield Measured(f"{group.dataset}, {horizon} steps{rows}", model, group.score(model, "mse", horizon))


def of_lm(records: Sequence[Record]) -> Iterator[Measured]:
    """Models by the options of their mixers too, as in `FEM-SM, start=prior`: each set of options is a setting of its
    own, with the models that have no such options in it."""
    held: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    texts: dict[str, list[str]] = defaultdict(list)
    for record in records:
        setting, seed = as_text([record["text"], record["experiment"]]), record["seed"]
        if setting not in (experiments := texts[record["text"]]):
            experiments.append(setting)
        known = held[setting, record["model"]].setdefault(seed, record["loss"])
        named = f"{record['model']}, seed {seed}"
        check(known == record["loss"], "results", named, f"one loss of it: there are {known} and {record['loss']}")
    stems = [Path(text).stem for text in texts]
    rows: dict[str, str] = {}
    for text, experiments in texts.items():
        title = Path(text).stem if stems.count(Path(text).stem) == 1 else text
        for number, setting in enumerate(experiments, 1):
            rows[setting] = title if len(experiments) == 1 else f"{title}, experiment {number}"
    variants = {name: {model.partition(", ")[2] for setting, model in held if setting == name} for name in rows}
    for (setting, model), losses in held.items():
        name, _, own = model.partition(", ")
        for variant in {own} if own or is_fem(name) else sorted(variants[setting]):
            title = f"{rows[setting]}, {variant}" if variant else rows[setting]
            yield Measured(title, name, Score(losses, len(losses)), not variant)


class Kind(NamedTuple):
    """A task: how its records become scores, the unit of a difference, and by how much it is multiplied; a difference
    above zero is a gain."""

    title: str
    measured: Callable[[Sequence[Record]], Iterable[Measured]]
    unit: str
    scale: float
    digits: int


KINDS = {
    "mad": Kind("MAD", of_mad, "points of accuracy", 100, 1),
    "vision": Kind("Vision", of_vision, "points of accuracy", 100, 2),
    "lm": Kind("Language models", of_lm, "validation loss, nats per token x 1000, less is better", -1000, 1),
    "forecast": Kind("Forecasting", of_forecast, "test MSE x 1000, less is better", -1000, 1),
}


@dataclass(frozen=True)
class Evidence:
    """What FEM gains over its prior, or any model over another: paired differences with 95 % intervals.

    Writes table.md, which it prints, table.tex and table.csv.
    """

    results: tuple[Path, ...]
    """Stores of `femixer mad | vision | forecast run`, folders of `femixer lm compare`, or files of their `export`."""
    pairs: tuple[str, ...] = tuple(":".join(pair) for pair in PAIRS)
    """Models to compare, each as BETTER:WORSE: FEM-SM:SMAttn+C,G is what the free energy adds to the other parts."""
    out: Path = Path("results/evidence")
    """Folder of the files."""


def main(args: Sequence[str]) -> int:
    command = parse(Evidence, args, "evidence")
    check_no_run(command.out)
    check_different(command, "pairs")
    pairs = [pair_of(text) for text in command.pairs]
    report(command.out, [tabulate(load(command.results), pairs)])
    return 0


def pair_of(text: str) -> Pair:
    better, _, worse = text.partition(":")
    for name in (better, worse):
        check(name in NAMED, "pairs", text, f"two of {', '.join(NAMED)} with a colon between them")
    check(better != worse, "pairs", text, "two different models")
    return better, worse


def load(paths: Sequence[Path]) -> dict[str, list[Record]]:
    """Records by task; each path is of one task."""
    readers = {name: import_module(f"femixer.tasks.{name}").TASK.load for name in KINDS}
    found: dict[str, list[Record]] = defaultdict(list)
    for path in paths:
        check(path.exists(), "results", str(path), "a store of results, or an exported file")
        for name, read in readers.items():
            with suppress(ValueError):
                found[name] += read(path)
                break
        else:
            raise ValueError(f"results={str(path)!r} are not results of one of {', '.join(readers)}")
    return found


def tabulate(records: dict[str, list[Record]], pairs: Sequence[Pair] = PAIRS) -> Table:
    groups = [group for name, kind in KINDS.items() if (group := gains(kind, records.get(name, []), pairs))]
    wanted = ", ".join(f"{better} and {worse}" for better, worse in pairs)
    check(len(groups) > 0, "results", "without pairs", f"records of both of one pair: {wanted}")
    titles = [f"{better} - {worse}" for better, worse in pairs]
    columns = [Column("Setting"), *(Column(title, key=title, scores=True) for title in titles)]
    notes = (
        "Mean of the differences between both models (GLA, AFT and Mamba: with the mean as read), of the same setting "
        "and seed, above zero where the first is better; in brackets its 95 % interval by Student's t, behind it the "
        "number of pairs. An "
        f"interval of {FEWEST} pairs or more without zero is bold. All settings of a benchmark are pairs of one "
        "interval in its last row; they share seeds and data, so that interval is rather too short. With this many "
        "intervals, one in twenty leaves zero out by chance.",
    )
    return Table(columns, groups, notes=notes)


def gains(kind: Kind, records: Sequence[Record], pairs: Sequence[Pair]) -> Group | None:
    scores: dict[str, dict[str, Score]] = defaultdict(dict)
    apart = set[str]()
    for setting, model, score, counted in kind.measured(records) if records else ():
        scores[setting][model] = score
        apart |= set() if counted else {setting}
    everything: dict[Pair, list[float]] = defaultdict(list)
    rows: list[Row] = []
    for setting, of in scores.items():
        cells: list[Cell] = []
        for better, worse in pairs:
            there = {better, worse} <= {*of} and (is_fem(better) or setting not in apart)
            found = difference(of[better], of[worse]).scores.values() if there else ()
            own = [kind.scale * each for each in found]
            everything[better, worse] += [] if setting in apart else own
            cells.append(cell(own, kind.digits))
        if any(each.value for each in cells):
            rows.append([setting, *cells])
    if not rows:
        return None
    rows.append(["all", *(cell(everything[pair], kind.digits) for pair in pairs)])
    return Group(rows, f"{kind.title}, {kind.unit}")


def cell(differences: Sequence[float], digits: int) -> Cell:
    if not differences:
        return Cell()
    found = Difference.of(differences)
    sure = found.count >= FEWEST and found.is_told_apart
    return Cell(f"{found.text(digits)}, {found.count}", mark="best" if sure else "")
