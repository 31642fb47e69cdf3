"""Numbers of a table: a mean over seeds with its error, what is missing, and the published figure beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from femixer.training import atomic


def write_table(out: Path, markdown: str, latex: str, csv: str) -> None:
    """table.md, table.tex and table.csv in a folder, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (("table.md", markdown), ("table.tex", latex), ("table.csv", csv)):
        atomic.write(out / name, content)


@dataclass(frozen=True)
class Cell:
    """A score of one model."""

    scores: Mapping[int, float] = field(default_factory=dict)
    """seed -> score: only of seeds whose jobs are all finished."""
    seeds: int = 0
    """In all results, whatever the model."""
    jobs: int = 0
    """Finished, of all seeds."""
    expected: int = 0
    """Jobs, of all seeds."""

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.scores.values()) if self.scores else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean over seeds."""
        count = len(self.scores)
        return statistics.stdev(self.scores.values()) / math.sqrt(count) if count > 1 else None

    @property
    def complete(self) -> bool:
        return len(self.scores) == self.seeds


@dataclass(frozen=True)
class Entry:
    """A cell as text; empty where there is none."""

    value: str
    error: str
    missing: str
    paper: str
    best: bool = False


def markdown_cell(entry: Entry) -> str:
    value = f"**{entry.value}**" if entry.best else entry.value
    ours = [value, entry.error and f"± {entry.error}", entry.missing and f"[{entry.missing}]"]
    return " ".join(filter(None, [" ".join(filter(None, ours)) or "–", entry.paper and f"({entry.paper})"]))


def latex_cell(entry: Entry) -> str:
    value = rf"\textbf{{{entry.value}}}" if entry.best else entry.value
    first = value + (rf"{{\scriptsize$\pm${entry.error}}}" if entry.error else "")
    small = [entry.missing and f"[{entry.missing}]", entry.paper and f"({entry.paper})"]
    return stacked([first or ("" if entry.missing else "--"), *(text and rf"\scriptsize {text}" for text in small)])


def stacked(lines: Sequence[str]) -> str:
    return r"\makecell{" + r"\\".join(filter(None, lines)) + "}"


def escaped(text: str) -> str:
    """As LaTeX prints it."""
    special = {character: f"\\{character}" for character in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(character, character) for character in text)
