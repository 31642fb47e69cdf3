"""The results of `femixer bench lm`, as they are written to lm.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from femixer.bench.measure import Spread, paired_ratio


@dataclass(frozen=True)
class Speed:
    """Tokens per second, and their ratio to the rival's of the same round: above 1 is faster than the rival.

    samples: seconds, one per round.
    """

    tokens_per_second: Spread
    ratio: Spread
    samples: Sequence[float]

    @classmethod
    def of(cls, tokens: int, seconds: Sequence[float], rival: Sequence[float]) -> Speed:
        """Of samples that take so many seconds for so many tokens, as the rival's do."""
        return cls(Spread.of([tokens / s for s in seconds]), paired_ratio(rival, seconds), seconds)


@dataclass(frozen=True)
class TrainingCost:
    """Forward, backward and a step of AdamW; the rival is the plain transformer."""

    name: str
    prior: str
    parameters: int
    speed: Speed


@dataclass(frozen=True)
class DecodeCost:
    """One more token after a context; the rival is Llama, also for cache_bytes, which are of one sequence.

    bytes_per_token: of the context, None where the cache does not grow.
    """

    name: str
    prior: str
    cache: str | None
    context: int
    speed: Speed
    cache_bytes: float
    cache_ratio: float
    bytes_per_token: float | None


@dataclass(frozen=True)
class Report:
    settings: dict[str, Any]
    environment: dict[str, Any]
    training: list[TrainingCost]
    decode: list[DecodeCost]


def growth(last: DecodeCost, first: DecodeCost) -> Spread:
    """Time per token at the last context relative to the first, round by round."""
    return paired_ratio(last.speed.samples, first.speed.samples)
