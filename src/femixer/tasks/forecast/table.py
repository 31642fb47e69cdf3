"""`femixer forecast table`: results of `femixer forecast run` in the layout of the paper's table.

A job is a model trained on one data set, for one horizon and with one seed; its errors are those on the test split, of
the weights with the lowest validation MSE. Where jobs differ in what is TUNED as well, the setting with the lowest
validation MSE, as the mean over seeds, counts; one that has fewer seeds than another does not.

Is one model better than another on the same test windows? Below stand paired differences with an interval over windows.
Windows of stride 1 overlap: two that begin less than a horizon apart share rows, and their errors are nearly the same.
The interval counts that (`difference`); taking windows as independent would make it several times too narrow.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from femixer.reporting import Cell, Column, Group, Row, Score, Table, marked, mean_of
from femixer.reporting.table import Difference
from femixer.tasks.forecast.data import LOOKBACKS
from femixer.tasks.runner import Tabulate, note_of_priors, over_seeds, usual_notes
from femixer.training.results import Record
from femixer.training.store import as_text, besides, best, distinct, same, setting

COLUMNS = ("FEM-SM", "FEM-GLA", "FEM-Mamba", "FEM-AFT", "GLA", "AFT", "iTransformer", "PatchTST", "DLinear")
"""Of the paper's table, from left to right."""
_MEANS = {
    "weather": (0.222, 0.223, 0.218, 0.218, 0.223, 0.221, 0.232, 0.221, 0.233),
    "solar": (0.189, 0.188, 0.193, 0.186, 0.204, 0.198, 0.219, 0.202, 0.216),
    "ETTh1": (0.419, 0.418, 0.421, 0.414, 0.418, 0.421, 0.454, 0.413, 0.422),
    "ETTh2": (0.340, 0.344, 0.340, 0.339, 0.342, 0.342, 0.374, 0.330, 0.426),
    "ETTm1": (0.341, 0.345, 0.346, 0.344, 0.357, 0.351, 0.373, 0.346, 0.347),
    "ETTm2": (0.242, 0.247, 0.246, 0.241, 0.250, 0.245, 0.265, 0.247, 0.252),
}
DATASETS = tuple(_MEANS)
"""Of the paper's table, from top to bottom."""
MEANS = {
    (dataset, model): error for dataset, errors in _MEANS.items() for model, error in zip(COLUMNS, errors, strict=True)
}
"""(data set, model) -> test MSE, the mean over horizons 96, 192, 336 and 720 (Table tab:ts-forecast)."""

PER_HORIZON = {
    ("ETTh1", "PatchTST"): {96: 0.370, 192: 0.413, 336: 0.422, 720: 0.447},
    ("ETTh1", "DLinear"): {96: 0.375, 192: 0.405, 336: 0.439, 720: 0.472},
    ("ETTh1", "iTransformer"): {96: 0.386, 192: 0.441, 336: 0.487, 720: 0.503},
}
"""Test MSE as published, at look-backs of their own: PatchTST/64 at 512 (Nie et al., 2023), DLinear at 336 (Zeng et
al., 2023), iTransformer at 96 (Liu et al., 2024)."""


METRICS = ("mse", "mae")
TUNED = ("lr", "weight_decay")
"""Options of training that validation chooses, for each model, data set and horizon."""


@dataclass(frozen=True)
class Compared:
    """Results that a mean over horizons may be taken of."""

    dataset: str
    lookback: int | None
    """None: the protocol's, which goes with the horizon."""
    horizons: tuple[int, ...]
    seeds: tuple[int, ...]
    chosen: dict[tuple[str, int], list[Record]]
    """(model, horizon) -> the records that count, one per seed."""

    @property
    def look(self) -> str:
        """As it is shown."""
        return "protocol" if self.lookback is None else str(self.lookback)

    def score(self, model: str, metric: str, *horizons: int) -> Score:
        """The mean over the horizons, of the seeds that all of them have."""
        found = [{r["seed"]: r[metric] for r in self.chosen.get((model, horizon), ())} for horizon in horizons]
        return mean_of([Score(scores, len(self.seeds), len(scores), len(self.seeds)) for scores in found])


def groups(records: Sequence[Record], tuned: Sequence[str] = TUNED) -> list[Compared]:
    """In the order of the data sets' first records, the protocol's look-backs first, each job once; an error if they
    are not of one experiment."""
    same(records, "data of one name", lambda record: record["fingerprint"], "dataset")
    same(records, "ways of training", lambda record: as_text(besides(record, tuned)), "dataset", "lookback", "horizon")
    same(records, "models of one name", lambda record: as_text(record["fields"]), "model", "dataset")
    definition = ("model", "dataset", "horizon", "lookback", "seed", "training")
    held: dict[tuple[str, int | None], dict[tuple[str, int], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in distinct(records, lambda record: record["mse"], definition):
        horizon, lookback = record["horizon"], record["lookback"]
        place = record["dataset"], None if LOOKBACKS.get(horizon) == lookback else lookback
        held[place][record["model"], horizon].append(record)
    order = [*dict.fromkeys(dataset for dataset, _ in held)]
    found = []
    for place in sorted(held, key=lambda place: (order.index(place[0]), place[1] is not None, -(place[1] or 0))):
        every = [record for own in held[place].values() for record in own]
        horizons, seeds = (tuple(sorted({record[name] for record in every})) for name in ("horizon", "seed"))
        chosen = {of: best(own, tuned, lambda record: record["validation_mse"]) for of, own in held[place].items()}
        found.append(Compared(*place, horizons, seeds, chosen))
    return found


ORDER = (
    *("FEM-SM", "FEM-GLA", "FEM-Mamba", "FEM-AFT", "SMAttn", "GLA", "Mamba", "AFT"),
    *("iTransformer", "PatchTST", "DLinear", "NLinear", "ETS", "SeasonalNaive", "LastValue"),
)
"""Columns from left to right; models that are not among them follow."""
NO_SEASON = "SeasonalNaive equals LastValue: the rows have no season (day, week or year) that fits into the look-back."
NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "epochs": "number of epochs"}


def tabulate(records: Sequence[Record], tuned: Sequence[str] = TUNED) -> list[Table]:
    """A table for each metric, and the paired differences of FEM and its priors; the notes below the last."""
    found = groups(records, tuned)
    present = {record["model"]: None for record in records}
    models = [*(name for name in ORDER if name in present), *(name for name in present if name not in ORDER)]
    tables = [
        Table(
            columns_of(metric.upper(), models, hidden=True),
            [Group([*lines(results, models, metric)]) for results in found],
            stacked=True,
            melted=("model", "value"),
        )
        for metric in METRICS
    ]
    places = [(results, horizon) for results in found for horizon in results.horizons]
    paired, notes = paired_table(places)
    tables = tables if paired is None else [*tables, paired]
    return [*tables[:-1], replace(tables[-1], notes=[*legend(records, tables[0], tuned), *notes])]


def columns_of(first: str, names: Sequence[str], hidden: bool) -> list[Column]:
    """Of both kinds of tables; hidden: the metric, which the title of the first column says."""
    place = (Column(first, key="dataset"), Column("Look-back", key="lookback"), Column("Horizon"))
    return [*place, Column("metric", hidden=hidden), *(Column(name, key=name, scores=True) for name in names)]


def lines(results: Compared, models: Sequence[str], metric: str) -> Iterator[Row]:
    """One per horizon, their mean, and if that is over others than the paper's, a line of its figures alone."""

    def line(title: str, scores: Sequence[Score], published: Sequence[float | None]) -> Row:
        printed = ["" if figure is None or metric != "mse" else f"{figure:.3f}" for figure in published]
        cells = [score.cell(3, paper=paper) for score, paper in zip(scores, printed, strict=True)]
        return [results.dataset, results.look, title, metric, *marked(cells, higher=False)]

    for horizon in results.horizons:
        published = [PER_HORIZON.get((results.dataset, model), {}).get(horizon) for model in models]
        yield line(str(horizon), [results.score(model, metric, horizon) for model in models], published)
    paper = [MEANS.get((results.dataset, model)) for model in models]
    everything = results.horizons == tuple(LOOKBACKS)
    if len(results.horizons) > 1:
        title = "mean" if everything else f"mean of {', '.join(map(str, results.horizons))}"
        means = [results.score(model, metric, *results.horizons) for model in models]
        yield line(title, means, paper if everything else [None] * len(models))
    if not everything and any(paper) and metric == "mse":
        yield line(f"mean of {', '.join(map(str, LOOKBACKS))}", [Score()] * len(models), paper)


def legend(records: Sequence[Record], shown: Table, tuned: Sequence[str]) -> list[str]:
    """What a reader must know."""
    text = [
        "Test errors in units of the training rows' standard deviation, at the lowest validation MSE; "
        f"{over_seeds(records)}. The best of a row is bold. Look-backs of the protocol are "
        + ", ".join(f"{lookback} for {horizon}" for horizon, lookback in LOOKBACKS.items())
        + "."
    ]
    if any(isinstance(each, Cell) and each.paper for row in shown.rows for each in row):
        text.append(
            "In parentheses: the paper's MSE where rows are means over all four horizons, and single horizons as the "
            "models' own papers give them (PatchTST at look-back 512, DLinear 336, iTransformer 96)."
        )
    text += usual_notes(records, shown.rows)
    settings = {(record["model"], setting(record, tuned)) for record in records}
    if len(settings) > len({model for model, _ in settings}):
        *names, last = (NAMES[name] for name in tuned)
        text.append(f"Where several were run, {', '.join(names)} and {last} are those of the lowest validation MSE.")
    errors = {(r["dataset"], r["horizon"], r["lookback"], r["model"]): (r["mse"], r["mae"]) for r in records}
    if any(errors.get((*place, "LastValue")) == own for (*place, m), own in errors.items() if m == "SeasonalNaive"):
        text.append(NO_SEASON)
    return text + note_of_priors({record["model"] for record in records})


@dataclass(frozen=True)
class ForecastTabulate(Tabulate):
    """Put results of `femixer forecast run` into the layout of the paper's table.

    Writes table.md, which it prints, table.tex and table.csv: MSE and MAE of every data set and model, for each horizon
    and as the mean over them, and the differences of FEM and its priors with an interval over test windows.
    """

    results: tuple[Path, ...]
    """Stores of `femixer forecast run`, or files of `femixer forecast export`."""
    choose_epochs: bool = False
    """Choose among results of different --epochs by validation MSE too, as among learning rates.
    Without it, such results do not stand in one table."""
    out: Path = Path("results/forecast-table")
    """Folder of the files."""

    def tables(self, records: Sequence[Record]) -> list[Table]:
        return tabulate(records, (*TUNED, "epochs") if self.choose_epochs else TUNED)


ERRORS = "window_errors"
"""Of a record: {"mse": ..., "mae": ...}, those of each test window, packed."""
PAIRS = (("FEM-SM", "SMAttn"), ("FEM-GLA", "GLA"), ("FEM-Mamba", "Mamba"), ("FEM-AFT", "AFT"))
"""FEM and its prior with the mean as read."""
LAGS = 2
"""Horizons over which two windows' errors are taken as correlated."""
FEWEST = 3 * LAGS
"""Horizons of windows below which there is no interval."""


def packed(errors: np.ndarray) -> str:
    """Errors [N] as text: half-precision multiples of their mean, 3 characters each. NaN: a window without values."""
    finite = errors[np.isfinite(errors)]
    mean = float(finite.mean()) if finite.any() else 1.0
    halves = np.clip(errors / mean, 0, np.finfo(np.float16).max).astype("<f2")
    return f"{mean!r} {base64.b64encode(halves.tobytes()).decode()}"


def unpacked(text: str) -> np.ndarray:
    """What `packed` was given, to three digits."""
    mean, _, halves = text.partition(" ")
    return float(mean) * np.frombuffer(base64.b64decode(halves), "<f2").astype(np.float64)


def difference(differences: np.ndarray, horizon: int) -> Difference:
    """The mean d of differences d_t [N] between models on windows in the order of time, d +- c s.

        s^2 = (1/N) sum_{|k| < M} (1 - |k|/M) gamma_k,   M = 2 horizon   (Newey and West, 1987)

    gamma_k: autocovariance of d_t. c is the 97.5 % quantile for a fixed M/N (Kiefer and Vogelsang, 2005), larger than
    1.96 because s^2 is itself estimated from about N/M independent stretches.
    """
    mean, count, lags = float(differences.mean()), len(differences), LAGS * horizon
    if count < FEWEST * horizon:  # too few for an interval
        return Difference(mean, math.inf, count)
    around = differences - mean
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(around, size)
    gamma = np.fft.irfft(spectrum * spectrum.conj(), size)[:lags] / count
    weights = 2 * (1 - np.arange(lags) / lags)
    weights[0] = 1
    b = lags / count
    quantile = 1.9600 + 2.9694 * b + 0.4160 * b**2 - 0.5324 * b**3
    return Difference(mean, quantile * math.sqrt(max(float(weights @ gamma), 0.0) / count), count)


def compared(ours: Sequence[Record], theirs: Sequence[Record], metric: str, horizon: int) -> Difference | None:
    """Over windows, of the mean over the seeds that both have; None where a record has no errors of windows."""
    by_seed = [{r["seed"]: r[ERRORS][metric] for r in records if r.get(ERRORS)} for records in (ours, theirs)]
    seeds = sorted({*by_seed[0]} & {*by_seed[1]})
    if not seeds:
        return None
    each = [unpacked(by_seed[0][seed]) - unpacked(by_seed[1][seed]) for seed in seeds]
    differences = np.mean(each, axis=0)
    return difference(differences[~np.isnan(differences)], horizon)


def paired_table(places: Sequence[tuple[Compared, int]]) -> tuple[Table | None, list[str]]:
    """The table, None without any pair that has errors of windows; and sentences to stand below. places: results and
    horizons at which models are compared."""
    chosen = [{model: own for (model, h), own in results.chosen.items() if h == horizon} for results, horizon in places]
    there = {model for models in chosen for model in models}
    pairs = [pair for pair in PAIRS if there.issuperset(pair)]
    old = sum(not r.get(ERRORS) for models in chosen for own in models.values() for r in own)
    notes = []
    if old and pairs:
        notes.append(f"{old} jobs were stored without the errors of single windows: they have no paired difference.")
    rows: list[Row] = []
    for (results, horizon), models in zip(places, chosen, strict=True):
        for metric in METRICS:
            found = [compared(models.get(ours, ()), models.get(prior, ()), metric, horizon) for ours, prior in pairs]
            if any(found):
                rows.append([results.dataset, results.look, str(horizon), metric, *map(cell, found)])
    if not rows:
        return None, notes
    columns = columns_of("Difference", [" - ".join(pair) for pair in pairs], hidden=False)
    told = (
        "Differences of test errors window by window, seeds averaged; ± half the 95 % interval over windows, which "
        f"counts their overlap (Newey-West, {LAGS} horizons of lags); bold where the first model is better beyond it. "
        f"Without ±: fewer windows than {FEWEST} horizons."
    )
    # Not melted: what stands beside the number is no standard error, as that of the other tables.
    return Table(columns, [Group(rows)], stacked=True), [told, *notes]


def cell(found: Difference | None) -> Cell:
    if found is None:
        return Cell()
    error = "" if math.isinf(found.half_width) else f"{found.half_width:.4f}"
    return Cell(f"{found.mean:+.4f}", error, mark="best" if found.is_told_apart and found.mean < 0 else "")
