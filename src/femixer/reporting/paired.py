"""Differences of pairs that share all but what is compared: their mean, and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from femixer.options import check

# Quantiles 0.975 of Student's t by degrees of freedom; beyond, the last ones of these bounds.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_LARGER = ((120, 1.980), (60, 2.000), (40, 2.021), (30, 2.042))


@dataclass(frozen=True)
class Difference:
    """The mean of `count` differences and its 95 % interval by Student's t; a single pair has no interval."""

    mean: float
    half_width: float
    count: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        check(len(differences) > 0, "differences", list(differences), "at least one pair")
        mean, count = statistics.mean(differences), len(differences)
        if count == 1:
            return cls(mean, math.inf, 1)
        return cls(mean, student(count - 1) * statistics.stdev(differences) / math.sqrt(count), count)

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves zero out."""
        return abs(self.mean) > self.half_width

    def text(self, digits: int) -> str:
        if math.isinf(self.half_width):
            return f"{self.mean:+.{digits}f}"
        low, high = self.mean - self.half_width, self.mean + self.half_width
        return f"{self.mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def student(freedom: int) -> float:
    """Quantile 0.975 of Student's t; between the known ones the larger, so that no interval is too short."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    return next(quantile for bound, quantile in _LARGER if freedom >= bound)
