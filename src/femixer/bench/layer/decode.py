"""What one more token costs after a context."""

from __future__ import annotations

from typing import NamedTuple

from femixer.bench.decoder import Decoder
from femixer.bench.layer.options import Options
from femixer.bench.layer.report import DecodeCost, Timing
from femixer.bench.measure import race
from femixer.bench.mixers import Mixer
from femixer.bench.progress import progress
from femixer.priors.parsing import parse_prior
from femixer.priors.softmax import CACHES


class Entry(NamedTuple):
    """A mixer with one kind of cache: the name of a contestant."""

    mixer: Mixer
    cache: str | None = None


def measure_decode(options: Options) -> list[DecodeCost]:
    field = {}
    for mixer in options.mixers:
        for cache in _caches(mixer):
            layer = mixer.build(options, cache=cache)
            field[Entry(mixer, cache)] = Decoder.after(layer, options.context, options.decode_batch, options)
    with progress("decode", options.warmup + options.rounds) as advance:
        times = race({entry: decoder.time for entry, decoder in field.items()}, options.rounds, options.warmup, advance)
    rival = Entry(Mixer())
    return [
        DecodeCost(
            entry.mixer.name,
            entry.mixer.prior,
            entry.mixer.parts,
            entry.cache,
            Timing.of(times[entry], times[rival]),
            decoder.state_bytes,
            decoder.state_bytes / field[rival].state_bytes,
            decoder.state_bytes / options.context if decoder.grows else None,
        )
        for entry, decoder in field.items()
    ]


def _caches(mixer: Mixer) -> tuple[str | None, ...]:
    """Only the softmax prior has a choice, and only where there is an exponential to keep."""
    if mixer.parts is None or "L" not in mixer.parts:
        return (None,)
    name, given = parse_prior(mixer.prior)
    if name != "softmax":
        return (None,)
    return (given["cache"],) if "cache" in given else CACHES
