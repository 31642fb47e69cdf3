"""The results of `femixer bench layer`, as they are written to layer.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from femixer.bench.layer.parameters import Parameters
from femixer.bench.measure import Spread, paired_ratio


@dataclass(frozen=True)
class Timing:
    """Seconds of a call, and the ratio to attention's call of the same round."""

    seconds: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, seconds: Sequence[float], reference: Sequence[float]) -> Timing:
        return cls(Spread.of(seconds), paired_ratio(seconds, reference), seconds)


@dataclass(frozen=True)
class SequenceCost:
    """What a whole sequence costs. training: forward and backward, None where only the forward pass is measured.

    peak: the most bytes held beyond the weights and the input, gradients included, in training or else in the forward
    pass.
    """

    name: str
    prior: str
    parts: str | None
    mode: str
    length: int
    parameters: Parameters
    forward_flops: int
    training_flops: int | None
    forward: Timing
    training: Timing | None
    peak_bytes: int
    peak_ratio: float


@dataclass(frozen=True)
class DecodeCost:
    """What one more token costs, and the bytes of the state of one sequence.

    cache: which of the softmax prior's two; bytes_per_token: of the context, None where the state does not grow.
    """

    name: str
    prior: str
    parts: str | None
    cache: str | None
    step: Timing
    state_bytes: float
    state_ratio: float
    bytes_per_token: float | None


@dataclass(frozen=True)
class Report:
    settings: dict[str, Any]
    environment: dict[str, Any]
    layers: list[SequenceCost]
    decode: list[DecodeCost]
