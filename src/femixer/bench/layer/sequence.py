"""What a layer costs on a whole sequence: time, FLOPs and memory of the forward pass and of training."""

from __future__ import annotations

from typing import NamedTuple

import torch

from femixer.bench.call import Call
from femixer.bench.layer.options import Options
from femixer.bench.layer.parameters import Parameters
from femixer.bench.layer.report import SequenceCost, Timing
from femixer.bench.measure import flops, peak_memory, race, unlimited_compilation
from femixer.bench.mixers import Mixer
from femixer.bench.progress import progress


class Entry(NamedTuple):
    """A mixer in one mode: the name of a contestant."""

    mixer: Mixer
    mode: str


def measure_sequences(options: Options) -> list[SequenceCost]:
    with unlimited_compilation("compiled" in options.modes):
        costs = [_measure_length(options, length, training=True) for length in options.lengths]
        costs += [_measure_length(options, length, training=False) for length in options.forward_lengths]
    return [cost for same_length in costs for cost in same_length]


def contestants(options: Options, length: int) -> dict[Entry, Call]:
    x = torch.randn(options.batch, length, options.dim, **options.tensors).requires_grad_()
    gradient = torch.randn(x.shape, **options.tensors)
    field = {}
    for mode in options.modes:
        for mixer in options.mixers:
            layer = mixer.build(options, not options.encoder)
            function = torch.compile(layer, dynamic=False) if mode == "compiled" else layer
            field[Entry(mixer, mode)] = Call(function, layer, x, gradient)
    return field


def _measure_length(options: Options, length: int, training: bool) -> list[SequenceCost]:
    field = contestants(options, length)
    rounds = options.rounds, options.warmup
    counted = {entry.mixer: _count(options, entry.mixer, call, training) for entry, call in field.items()}
    with progress(f"first calls {length}", len(field)) as advance:
        for call in field.values():
            call.forward()
            if training:
                call.train_and_clear()
            advance()
    peaks = {}
    with progress(f"peak memory {length}", len(field)) as advance:
        for entry, call in field.items():
            peaks[entry] = peak_memory(call.train_and_clear if training else call.forward, call.x.device)
            advance()
    with progress(f"forward {length}", sum(rounds)) as advance:
        forward = race({entry: call.time_forward for entry, call in field.items()}, *rounds, advance)
    trained = {}
    if training:
        with progress(f"training {length}", sum(rounds)) as advance:
            trained = race({entry: call.time_training for entry, call in field.items()}, *rounds, advance)
    return [
        SequenceCost(
            entry.mixer.name,
            entry.mixer.prior,
            entry.mixer.parts,
            entry.mode,
            length,
            *counted[entry.mixer],
            forward=Timing.of(forward[entry], forward[rival]),
            training=Timing.of(trained[entry], trained[rival]) if training else None,
            peak_bytes=peaks[entry],
            peak_ratio=peaks[entry] / peaks[rival],
        )
        for entry in field
        for rival in [Entry(Mixer(), entry.mode)]
    ]


def _count(options: Options, mixer: Mixer, call: Call, training: bool) -> tuple[Parameters, int, int | None]:
    """Parameters and FLOPs (forward; forward and backward); they do not depend on the mode."""
    plain = call._replace(function=call.layer)
    return Parameters.of(mixer, options), flops(plain.forward), flops(plain.train_and_clear) if training else None
