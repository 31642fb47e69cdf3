"""Is one model better than another on the same test windows? Paired differences with an interval over windows.

Windows of stride 1 overlap: two that begin less than a horizon apart share rows, and their errors are nearly the same.
The interval counts that (`difference`); taking windows as independent would make it several times too narrow.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from femixer.reporting import Cell, Column, Group, Row, Table
from femixer.training.results import Record

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


class Difference(NamedTuple):
    """mean of a - b over windows, and half the width of its 95 % interval (None: too few windows for one)."""

    mean: float
    half: float | None


def difference(differences: np.ndarray, horizon: int) -> Difference:
    """The mean d of differences d_t [N] between models on windows in the order of time, d +- c s.

        s^2 = (1/N) sum_{|k| < M} (1 - |k|/M) gamma_k,   M = 2 horizon   (Newey and West, 1987)

    gamma_k: autocovariance of d_t. c is the 97.5 % quantile for a fixed M/N (Kiefer and Vogelsang, 2005), larger than
    1.96 because s^2 is itself estimated from about N/M independent stretches.
    """
    mean, count, lags = float(differences.mean()), len(differences), LAGS * horizon
    if count < FEWEST * horizon:
        return Difference(mean, None)
    around = differences - mean
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(around, size)
    gamma = np.fft.irfft(spectrum * spectrum.conj(), size)[:lags] / count
    weights = 2 * (1 - np.arange(lags) / lags)
    weights[0] = 1
    b = lags / count
    quantile = 1.9600 + 2.9694 * b + 0.4160 * b**2 - 0.5324 * b**3
    return Difference(mean, quantile * math.sqrt(max(float(weights @ gamma), 0.0) / count))


def compared(ours: Sequence[Record], theirs: Sequence[Record], metric: str, horizon: int) -> Difference | None:
    """Over windows, of the mean over the seeds that both have; None where a record has no errors of windows."""
    by_seed = [{r["seed"]: r[ERRORS][metric] for r in records if r.get(ERRORS)} for records in (ours, theirs)]
    seeds = sorted({*by_seed[0]} & {*by_seed[1]})
    if not seeds:
        return None
    each = [unpacked(by_seed[0][seed]) - unpacked(by_seed[1][seed]) for seed in seeds]
    differences = np.mean(each, axis=0)
    return difference(differences[~np.isnan(differences)], horizon)


class Place(NamedTuple):
    """A row of the table: where models are compared."""

    dataset: str
    lookback: str
    horizon: int
    chosen: Mapping[str, Sequence[Record]]
    """Model -> its records, one per seed."""


def paired_table(places: Iterable[Place], metrics: Sequence[str]) -> tuple[Table | None, list[str]]:
    """The table, None without any pair that has errors of windows; and sentences to stand below."""
    places = [*places]
    there = {model for place in places for model in place.chosen}
    pairs = [pair for pair in PAIRS if there.issuperset(pair)]
    old = sum(not r.get(ERRORS) for place in places for own in place.chosen.values() for r in own)
    notes = []
    if old and pairs:
        notes.append(f"{old} jobs were stored without the errors of single windows: they have no paired difference.")
    rows: list[Row] = []
    for place in places:
        for metric in metrics:
            found = [
                compared(place.chosen.get(ours, ()), place.chosen.get(prior, ()), metric, place.horizon)
                for ours, prior in pairs
            ]
            if any(found):
                rows.append([place.dataset, place.lookback, str(place.horizon), metric, *map(cell, found)])
    if not rows:
        return None, notes
    names = (
        Column("Difference", key="dataset"),
        Column("Look-back", key="lookback"),
        Column("Horizon"),
        Column("metric"),
    )
    titles = [" - ".join(pair) for pair in pairs]
    columns = (*names, *(Column(title, key=title, scores=True) for title in titles))
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
    better = found.half is not None and found.mean + found.half < 0
    return Cell(f"{found.mean:+.4f}", "" if found.half is None else f"{found.half:.4f}", mark="best" if better else "")
