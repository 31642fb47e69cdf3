"""What the project is content with, and the sizes that is meant for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from femixer.bench.lm.models import RIVALS
from femixer.bench.lm.report import DecodeCost, TrainingCost
from femixer.priors.parsing import parse_prior

# The least speed of FEM with the softmax prior: of the plain transformer's in training, of Llama's in decoding.
TRAINING, DECODE = 0.85, 0.90
# The largest cache of FEM with the softmax prior, where it keeps the values once.
CACHE = 0.78
# A time per token counts as flat in the context where it grows by no more than this.
FLAT = 1.10

SIZE = {"dim": 512, "heads": 8, "kv_heads": None, "layers": 8, "parts": "CLTG", "dtype": "float32", "device": "cpu"}
TRAINING_SIZE = {**SIZE, "batch": 2, "length": 1024, "vocabulary": 8192}
DECODE_SIZE = {**SIZE, "decode_batch": 1}
DECODE_CONTEXT = 1024


class DecodeTarget(NamedTuple):
    """At least this speed, at most this cache; None where there is none."""

    speed: float | None = None
    cache: float | None = None


def training_target(cost: TrainingCost, settings: Mapping[str, Any]) -> float | None:
    return TRAINING if _is_softmax(cost) and _fits(settings, TRAINING_SIZE) else None


def decode_target(cost: DecodeCost, settings: Mapping[str, Any]) -> DecodeTarget:
    if not (_is_softmax(cost) and cost.context == DECODE_CONTEXT and _fits(settings, DECODE_SIZE)):
        return DecodeTarget()
    return DecodeTarget(DECODE, CACHE if cost.cache == "value" else None)


def growth_target(cost: DecodeCost, settings: Mapping[str, Any]) -> float | None:
    """For caches of constant size, that is, for the priors in linear time."""
    return FLAT if cost.bytes_per_token is None and _fits(settings, DECODE_SIZE) else None


def _is_softmax(cost: TrainingCost | DecodeCost) -> bool:
    if cost.prior in RIVALS:
        return False
    name, given = parse_prior(cost.prior)
    return name == "softmax" and set(given) <= {"cache"}


def _fits(settings: Mapping[str, Any], size: Mapping[str, Any]) -> bool:
    return all(settings[name] == value for name, value in size.items())
