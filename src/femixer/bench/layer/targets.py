"""The largest ratios to attention that the project is content with, and the sizes they are meant for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from femixer.bench.layer.report import DecodeCost, SequenceCost
from femixer.bench.mixers import ATTENTION, canonical


class Target(NamedTuple):
    """For the forward pass, forward and backward, and peak memory; None where there is none."""

    forward: float | None = None
    training: float | None = None
    memory: float | None = None


_SHARED = {"kv_heads": None, "batch": 2, "dtype": "float32", "device": "cpu", "encoder": False, "busy": 0}
SOFTMAX_SIZE = {**_SHARED, "dim": 768, "heads": 12}
LINEAR_TIME_SIZE = {**_SHARED, "dim": 512, "heads": 8}
DECODE_SIZE = {**SOFTMAX_SIZE, "context": 4096, "decode_batch": 1}


def _linear_time(forward: float, training: float, forward_8192: float) -> dict[int, Target]:
    return {1024: Target(forward, training), 8192: Target(forward_8192)}


# By parts and length, eager and compiled.
SOFTMAX = {("LTG", 1024): Target(1.05, 1.10, 1.35), ("CLTG", 1024): Target(1.10, 1.20, 1.60)}
# By prior and length, with all parts, eager.
LINEAR_TIME = {
    "linear": _linear_time(0.85, 0.80, 0.28),
    "gla": _linear_time(0.85, 0.80, 0.28),
    "gla:decay=channel": _linear_time(1.5, 1.5, 0.48),
    "aft": _linear_time(0.75, 0.75, 0.26),
    "decay": _linear_time(0.75, 0.75, 0.26),
    "ssm": _linear_time(1.3, 1.5, 0.42),
    "mamba": _linear_time(1.3, 1.5, 0.42),
}
# By what the softmax prior caches.
DECODE = {"exp": 1.15, "value": 1.60}


def sequence_target(cost: SequenceCost, settings: Mapping[str, Any]) -> Target:
    """The target for a layer, without numbers where the measurement has another size than it is meant for."""
    if cost.prior == ATTENTION:
        return Target()
    prior = canonical(cost.prior)
    if prior == "softmax":
        return SOFTMAX.get((cost.parts or "", cost.length), Target()) if _fits(settings, SOFTMAX_SIZE) else Target()
    fits = _fits(settings, LINEAR_TIME_SIZE) and cost.parts == "CLTG" and cost.mode == "eager"
    return LINEAR_TIME.get(prior, {}).get(cost.length, Target()) if fits else Target()


def decode_target(cost: DecodeCost, settings: Mapping[str, Any]) -> float | None:
    return DECODE.get(cost.cache or "") if _fits(settings, DECODE_SIZE) else None


def _fits(settings: Mapping[str, Any], size: Mapping[str, Any]) -> bool:
    return all(settings[name] == value for name, value in size.items())
