"""The points of `femixer bench scaling`, and scaling.json, which keeps them from run to run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from femixer.bench.measure import Spread, paired_ratio
from femixer.training import atomic

NAME = "scaling.json"


@dataclass(frozen=True)
class SequencePoint:
    """Whole sequences of one length. samples: seconds per token, one per round.

    mixer: attention, or the prior of FEM as on the command line.
    """

    mixer: str
    step: str  # forward or training (forward and backward)
    length: int
    state_grows: bool
    peak_bytes: int
    samples: list[float]

    @property
    def seconds(self) -> Spread:
        return Spread.of(self.samples)


@dataclass(frozen=True)
class DecodePoint:
    """One more token after `position` others. samples: seconds for a token of every sequence of the batch."""

    mixer: str
    position: int
    state_grows: bool
    samples: list[float]

    @property
    def seconds(self) -> Spread:
        return Spread.of(self.samples)


def growth(last: SequencePoint | DecodePoint, first: SequencePoint | DecodePoint) -> Spread:
    """Time at the last point relative to the first, round by round."""
    return paired_ratio(last.samples, first.samples)


@dataclass
class Report:
    """All points measured with the same settings in the same environment."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    sequences: list[SequencePoint]
    decode: list[DecodePoint]

    @property
    def mixers(self) -> list[str]:
        """In the order they were measured."""
        return list(dict.fromkeys([*(p.mixer for p in self.sequences), *(p.mixer for p in self.decode)]))

    def sequence(self, mixer: str, step: str) -> dict[int, SequencePoint]:
        """By length, the shortest first."""
        found = {p.length: p for p in self.sequences if (p.mixer, p.step) == (mixer, step)}
        return dict(sorted(found.items()))

    def decoding(self, mixer: str) -> dict[int, DecodePoint]:
        """By position, the nearest first."""
        return dict(sorted({p.position: p for p in self.decode if p.mixer == mixer}.items()))

    def save(self, folder: Path) -> None:
        atomic.write(folder / NAME, json.dumps({"benchmark": "scaling", **asdict(self)}, indent=2) + "\n")

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any], environment: Mapping[str, Any], overwrite: bool) -> Report:
        """What the folder holds, to go on with; empty where it holds nothing or shall be overwritten."""
        path = folder / NAME
        if overwrite or not path.exists():
            return cls(dict(settings), dict(environment), [], [])
        advice = "--overwrite starts anew, or choose another --out"
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            sequences = [SequencePoint(**point) for point in held["sequences"]]
            decode = [DecodePoint(**point) for point in held["decode"]]
            was = {**held["settings"], **held["environment"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"out={str(folder)!r} holds a {NAME} that cannot be read; {advice}") from None
        now = {**settings, **environment}
        differences = [_difference(name, was, now) for name in {**was, **now} if was.get(name) != now.get(name)]
        if differences:
            reasons = ", ".join(differences)
            raise ValueError(f"out={str(folder)!r} holds points measured otherwise: {reasons}; {advice}")
        return cls(dict(settings), dict(environment), sequences, decode)


def _difference(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {was.get(name)!r} and is now {now.get(name)!r}"


def missing(wanted: Iterable[int], found: Mapping[int, object]) -> list[int]:
    return sorted(set(wanted) - set(found))
