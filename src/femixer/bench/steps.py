"""The cost of a training step, as `femixer bench vision` and `femixer bench forecast` write it to their JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from femixer.bench.measure import Spread, paired_ratio, race
from femixer.bench.progress import progress
from femixer.bench.training import Training


@dataclass(frozen=True)
class StepCost:
    """Forward, backward and a step of AdamW: seconds, and their ratio to the rival's of the same round.

    name: as the table shows it; key: as it was asked for. samples: seconds, one per round.
    """

    name: str
    key: str
    parameters: int
    seconds: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, name: str, key: str, parameters: int, samples: Sequence[float], rival: Sequence[float]) -> StepCost:
        return cls(name, key, parameters, Spread.of(samples), paired_ratio(samples, rival), samples)


@dataclass(frozen=True)
class Report:
    settings: dict[str, Any]
    environment: dict[str, Any]
    training: list[StepCost]


def race_of_steps(
    field: Mapping[str, Training], names: Mapping[str, str], rival: str, rounds: int, warmup: int
) -> list[StepCost]:
    """The models by key, one step each in every round."""
    samples = {key: training.time for key, training in field.items()}
    with progress("training", warmup + rounds) as advance:
        seconds = race(samples, rounds, warmup, advance)
    return [
        StepCost.of(names[key], key, training.parameters, seconds[key], seconds[rival])
        for key, training in field.items()
    ]
